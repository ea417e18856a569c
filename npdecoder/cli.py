"""The command line: npdecoder demo, train, translate, gradcheck."""

from __future__ import annotations

import argparse
import copy
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from npdecoder import __version__, console, phrase_book
from npdecoder.checkpoint import check_writable
from npdecoder.core import Array
from npdecoder.gradcheck import GradcheckReport, gradcheck
from npdecoder.gradcheck_all import gradcheck_all
from npdecoder.layers import CrossEntropy
from npdecoder.models import Transformer, TransformerConfig
from npdecoder.optim import SGD, cosine_schedule
from npdecoder.text import (
    PairOfIds,
    Vocabulary,
    batches,
    detokenize,
    read_pairs,
    split_pairs,
    tokenize,
)
from npdecoder.training import Progress, evaluate, train
from npdecoder.translator import Translator

DEMO_MODEL = "npdecoder-demo.npz"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 (a gradient is wrong), 2 (an error), 130 (Ctrl-C)."""
    console.prepare(sys.stdout)
    console.prepare(sys.stderr)
    try:
        args = _parser().parse_args(argv)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            warnings.simplefilter("always", UserWarning)
            warnings.simplefilter("ignore", RuntimeWarning)  # an overflow ends in its own error
            code = int(args.run(args))
            if sys.stdout is not None:
                sys.stdout.flush()
            return code
    except BrokenPipeError:  # | head: nobody reads on
        return 0
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError) as error:
        print(f"npdecoder: error: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("npdecoder: stopped", file=sys.stderr)
        return 130
    finally:
        _flush()


def _flush() -> None:
    """Write out what is buffered, or drop it: Python's own try at exit shall not fail."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="npdecoder",
        description="A Transformer in plain NumPy, its backward pass written by hand and proven.",
        epilog="Begin with: npdecoder demo",
    )
    parser.add_argument("--version", action="version", version=f"npdecoder {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = commands.add_parser(
        "demo",
        help="train a small English-Chinese translator on the built-in phrase book",
        description="Train a translator on the built-in phrase book, by backpropagation that is "
        "written by hand. Prints how many phrases that it has never seen it translates "
        "exactly, what it looked at, and the check of its gradients.",
    )
    demo.add_argument("--out", default=DEMO_MODEL, metavar="MODEL.npz", help=_help("saved model"))
    demo.add_argument("--steps", type=positive_int, default=1000, help=_help("updates"))
    demo.add_argument("--seed", type=natural_int, default=0, help=_help("of weights and batches"))
    demo.set_defaults(run=_demo)

    training = commands.add_parser(
        "train",
        help="train a translator on a file of sentence pairs",
        description="Train a translator on a UTF-8 file of lines: source TAB target (further "
        "columns are ignored). A part of the source sentences is held out of the training to "
        "measure the loss on. Weights, config and vocabularies go to one file.",
        epilog="Example: npdecoder train pairs.tsv --out model.npz --steps 5000",
    )
    training.add_argument("pairs", metavar="PAIRS.tsv", help="file of sentence pairs")
    training.add_argument("--out", required=True, metavar="MODEL.npz", help="the model to write")
    for option, kind, default, text in (
        ("--d-model", positive_int, 128, "width of the model"),
        ("--num-heads", positive_int, 4, "attention heads"),
        ("--num-layers", positive_int, 2, "layers of the encoder, and of the decoder"),
        ("--d-ff", positive_int, None, "width of the feed-forward (default: 4 d-model)"),
        ("--dropout", float, 0.1, "rate of dropout"),
        ("--steps", positive_int, 4000, "updates"),
        ("--batch-size", positive_int, 64, "sentence pairs in an update"),
        ("--lr", float, 0.5, "highest learning rate; warm-up, then a cosine down to 0"),
        ("--warmup", natural_int, 200, "updates of the warm-up"),
        ("--momentum", float, 0.9, "momentum of SGD"),
        ("--weight-decay", float, 0.0, "weight decay of SGD"),
        ("--max-norm", float, 1.0, "the gradient is clipped to this norm"),
        ("--label-smoothing", float, 0.0, "label smoothing of the training loss"),
        ("--min-count", positive_int, 2, "rarer words become <unk>"),
        ("--max-len", positive_int, 64, "pairs with a longer sentence (in tokens) are left out"),
        ("--held-out", float, 0.05, "share of the source sentences to hold out"),
        ("--validate-every", positive_int, 500, "updates between two validations"),
        ("--seed", natural_int, 0, "of split, weights, batches and dropout"),
    ):
        training.add_argument(
            option, type=kind, default=default, help=_help(text) if default is not None else text
        )
    training.set_defaults(run=_train)

    translate = commands.add_parser(
        "translate",
        help="translate text with a trained model",
        description="Translate the given text, or each line of standard input. Words that the "
        "model does not know are named on stderr.",
        epilog=f'Example: npdecoder translate {DEMO_MODEL} "I love you"',
    )
    translate.add_argument("model", metavar="MODEL.npz", help="made by demo or train")
    translate.add_argument("text", nargs="*", help="the text (default: lines of standard input)")
    translate.set_defaults(run=_translate)

    check = commands.add_parser(
        "gradcheck",
        help="check the gradients of every layer, block and model",
        description="Compare every backward with central differences of its forward, in float64, "
        "for random weights, sizes, options and masks. Exit code 1 if one is wrong.",
    )
    check.add_argument("--seed", type=natural_int, default=0, help=_help("of all that is random"))
    check.set_defaults(run=_gradcheck)
    return parser


def _help(text: str) -> str:
    return f"{text} (default: %(default)s)"


def positive_int(text: str) -> int:
    return _int(text, 1)


def natural_int(text: str) -> int:
    return _int(text, 0)


def _int(text: str, at_least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = at_least - 1
    if value < at_least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {at_least}")
    return value


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = str(error) or type(error).__name__
    return " ".join(text.split())


def _show_warning(message: Warning | str, *details: Any, **more: Any) -> None:
    print(f"npdecoder: {' '.join(str(message).split())}", file=sys.stderr)


class Run(NamedTuple):
    """What one training needs besides the pairs."""

    steps: int
    batch_size: int
    lr: float
    warmup: int
    momentum: float
    weight_decay: float
    max_norm: float
    label_smoothing: float
    validate_every: int
    min_count: int
    seed: int


def _fit(
    train_pairs: Sequence[tuple[str, str]],
    held_out: Sequence[tuple[str, str]],
    run: Run,
    **config: Any,
) -> tuple[Translator, Progress, Sequence[PairOfIds]]:
    """A Translator trained on train_pairs; its Progress; held_out as ids."""
    sources = Vocabulary.build((tokenize(s) for s, _ in train_pairs), run.min_count)
    targets = Vocabulary.build((tokenize(t) for _, t in train_pairs), run.min_count)
    model = Transformer(
        TransformerConfig(len(sources), len(targets), pad_id=Vocabulary.pad_id, **config), run.seed
    )
    translator = Translator(model, sources, targets)
    ids, held_out_ids = translator.encode_pairs(train_pairs), translator.encode_pairs(held_out)
    print(
        f"{len(train_pairs)} pairs to train on, {len(held_out)} held out; vocabularies of "
        f"{len(sources)} and {len(targets)}; {model.num_parameters():,} parameters",
        flush=True,
    )
    tokens = [i for pair in ids for side in pair for i in side]
    unknown = tokens.count(Vocabulary.unk_id) / max(len(tokens), 1)
    if unknown > 0.0:
        print(f"{100 * unknown:.1f} % of the words are too rare (--min-count) and become <unk>")

    rng = np.random.default_rng(run.seed)
    optimizer = SGD(model.parameters(), run.lr, run.momentum, run.weight_decay)
    progress = Progress(run.steps)
    train(
        model,
        CrossEntropy(ignore_index=Vocabulary.pad_id, label_smoothing=run.label_smoothing),
        optimizer,
        lambda: _batches(ids, run.batch_size, rng),
        run.steps,
        schedule=cosine_schedule(run.lr, run.steps, min(run.warmup, run.steps)),
        max_norm=run.max_norm,
        rng=rng,
        validate=(lambda: _loss(model, held_out_ids)) if held_out_ids else None,
        validate_every=run.validate_every,
        progress=progress,
    )
    return translator, progress, held_out_ids


def _batches(pairs: Sequence[PairOfIds], size: int, rng: np.random.Generator | None) -> Any:
    return batches(
        pairs, size, rng, Vocabulary.pad_id, Vocabulary.bos_id, Vocabulary.eos_id
    )


def _loss(model: Callable[..., Array], pairs: Sequence[PairOfIds]) -> float:
    return evaluate(model, CrossEntropy(ignore_index=Vocabulary.pad_id), _batches(pairs, 64, None))


def _blind(model: Transformer) -> Callable[..., Array]:
    """The model with its memory zeroed: how much worse is it if it cannot read the source?"""

    def logits(source_ids: Array, target_ids: Array) -> Array:
        memory = np.zeros((*source_ids.shape, model.config.d_model), np.float32)
        return model.decode(target_ids, memory, source_ids)[0]

    return logits


def _unigram_loss(
    translator: Translator,
    train_pairs: Sequence[tuple[str, str]],
    held_out: Sequence[tuple[str, str]],
) -> float:
    """The loss of the training targets' frequencies, each count plus one."""
    size, eos_id = len(translator.target_vocabulary), translator.target_vocabulary.eos_id

    def counts(pairs: Sequence[tuple[str, str]]) -> Array:
        ids = [i for _, target in translator.encode_pairs(pairs) for i in (*target, eos_id)]
        return np.bincount(ids, minlength=size)

    frequencies, wanted = counts(train_pairs) + 1.0, counts(held_out)
    log_p = np.log(frequencies / frequencies.sum())
    return float(-(wanted * log_p).sum() / wanted.sum())


def _demo(args: argparse.Namespace) -> int:
    check_writable(args.out)
    train_pairs, held_out = phrase_book.split()
    print("English to Chinese, trained by a backward pass that is written by hand.")
    run = Run(
        steps=args.steps,
        batch_size=32,
        lr=0.1,
        warmup=100,
        momentum=0.9,
        weight_decay=0.0,
        max_norm=1.0,
        label_smoothing=0.0,
        validate_every=100,
        min_count=1,
        seed=args.seed,
    )
    translator, progress, _ = _fit(
        train_pairs,
        held_out,
        run,
        d_model=64,
        num_heads=4,
        num_encoder_layers=1,
        num_decoder_layers=1,
        max_len=32,
    )
    translator.save(args.out)
    print(f"loss {progress.loss:.4f}, on held-out phrases {progress.validation_loss:.4f}")

    some = held_out[:: max(1, len(held_out) // 5)][:5]
    report = _show(translator, [*some, ("I love you", "我 爱 你")])
    print(f"\nheld-out exact match: {100 * translator.exact_match(held_out):.1f} %")
    _conclude(report, args.out)
    return 0 if report.ok else 1


def _show(translator: Translator, pairs: Sequence[tuple[str, str]]) -> GradcheckReport:
    """Print the gradient check, the translations of pairs and the attention of one; the check."""
    ids = translator.encode_pairs(pairs)
    print("\nThe gradients, against central differences in float64:\n")
    model64 = copy.deepcopy(translator.model).astype(np.float64)
    report = gradcheck(model64, *translator.batch(ids).inputs, mode="directional")
    print(report)

    print("\nTranslations:\n")
    outputs = translator.translate_ids([source for source, _ in ids])
    rows = [["source", "npdecoder", "reference"]]
    rows += [[source, detokenize(o), target] for (source, target), o in zip(pairs, outputs)]
    print(console.table(rows))

    source = max((source for source, _ in pairs), key=len)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of unknown words
        alignment = translator.align(source)
    print(f'\nWhat each word of the translation of "{source}" looked at, in percent:\n')
    print(console.weight_map(alignment.target_tokens, alignment.source_tokens, alignment.A))
    return report


def _train(args: argparse.Namespace) -> int:
    check_writable(args.out)
    pairs = read_pairs(args.pairs)
    fitting = [
        (source, target)
        for source, target in pairs
        if max(len(tokenize(source)), len(tokenize(target))) <= args.max_len
    ]
    if len(fitting) < len(pairs):
        print(f"{len(pairs) - len(fitting)} pairs are longer than {args.max_len} tokens: left out")
    train_pairs, held_out = split_pairs(fitting, args.held_out, args.seed)
    if not train_pairs:
        raise ValueError(f"{args.pairs}: no pair is left to train on")
    run = Run(**{name: getattr(args, name) for name in Run._fields})
    translator, progress, held_out_ids = _fit(
        train_pairs,
        held_out,
        run,
        d_model=args.d_model,
        num_heads=args.num_heads,
        num_encoder_layers=args.num_layers,
        num_decoder_layers=args.num_layers,
        d_ff=args.d_ff,
        dropout=args.dropout,
        max_len=args.max_len + 1,  # and EOS
    )
    translator.save(args.out)
    print(f"{progress.tokens_per_second():,.0f} target tokens/s", file=sys.stderr)
    report = _show(translator, (held_out or train_pairs)[:5])
    print(f"\ntraining loss {progress.loss:.4f}")
    if held_out_ids:
        print(f"validation loss {_loss(translator.model, held_out_ids):.4f}")
        print(f"  of word frequencies alone {_unigram_loss(translator, train_pairs, held_out):.4f}")
        print(f"  with the source hidden    {_loss(_blind(translator.model), held_out_ids):.4f}")
        print(f"held-out exact match: {100 * translator.exact_match(held_out[:500]):.1f} %"
              + (" (of the first 500)" if len(held_out) > 500 else ""))
    _conclude(report, args.out)
    return 0 if report.ok else 1


def _conclude(report: GradcheckReport, out: str) -> None:
    print(
        f"gradients: {'all right' if report.ok else 'WRONG'}, "
        f"largest relative error {report.max_relative_error:.0e}"
    )
    print(f'saved: {out}  (try: npdecoder translate {out} "I love you")')


def _translate(args: argparse.Namespace) -> int:
    translator = Translator.load(args.model)
    if args.text:
        (output,) = translator.translate([" ".join(args.text)])
        print(output)
        return 0
    if sys.stdin is None:
        raise ValueError("there is no text: give it as an argument or on standard input")
    code = 0
    for line in sys.stdin:
        text = line.lstrip("\ufeff").strip()  # a byte order mark, if the lines come from a file
        try:
            print(*translator.translate([text]) if text else [""], flush=True)
        except ValueError as error:  # of this line; the next may be well
            print(f"npdecoder: error: {_one_line(error)}", file=sys.stderr)
            print(flush=True)
            code = 2
    return code


def _gradcheck(args: argparse.Namespace) -> int:
    print(f"backward against central differences in float64, seed {args.seed}:\n")
    print(f"{'':28} tensors  largest relative error")
    failed = []
    for name, options, report in gradcheck_all(args.seed):
        error = report.max_relative_error
        print(f"{name:28} {len(report.rows):7} {error:9.0e}  {'ok' if report.ok else 'WRONG'}")
        if options:
            print(f"    {options}")
        if not report.ok:
            failed.append(name)
            print(report)
    print(f"\nWRONG: {', '.join(failed)}" if failed else "\nall right")
    return 1 if failed else 0


