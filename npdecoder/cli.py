"""The command line: npdecoder demo, train, train-lm, translate, generate, trace, exercise,
gradcheck.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import numpy as np

from npdecoder import __version__, console, phrase_book
from npdecoder.character_model import CharacterModel
from npdecoder.checkpoint import Checkpoint, load_checkpoint
from npdecoder.core import Array
from npdecoder.exercises import command as exercise_command
from npdecoder.files import check_writable
from npdecoder.gradcheck import GradcheckReport, gradcheck
from npdecoder.gradcheck_all import gradcheck_all
from npdecoder.layers import CrossEntropy
from npdecoder.models import LanguageModel, LanguageModelConfig, Transformer, TransformerConfig
from npdecoder.optim import SGD, AdamW, cosine_schedule, decay_groups
from npdecoder.page import write_page
from npdecoder.replicas import Replicas
from npdecoder.runs import Run, fingerprint, refuse_other_text, resumed_options
from npdecoder.text import (
    Characters,
    PairOfIds,
    Vocabulary,
    batches,
    detokenize,
    read_pairs,
    read_text,
    split_pairs,
    tokenize,
    windows,
)
from npdecoder.traced import sentence_pair, translated, worked_example
from npdecoder.training import evaluate
from npdecoder.translator import Translator

DEMO_MODEL = "npdecoder-demo.npz"
LM_MODEL = "npdecoder-lm.npz"
SAVED = (
    "All goes to one file, again and again: a training that was stopped goes on with --resume. "
    "Ctrl-C saves and ends it."
)

Option = tuple[str, Callable[[str], Any], Any, str]  # name, type, default, help


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
        return 0 if args.run in (_translate, _generate, _trace) else 141
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError,
            ImportError) as error:
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
        "measure the loss on. " + SAVED,
        epilog="Example: npdecoder train pairs.tsv --out model.npz --steps 5000",
    )
    training.add_argument("pairs", metavar="PAIRS.tsv", help="file of sentence pairs")
    training.add_argument("--out", required=True, metavar="MODEL.npz", help="the model to write")
    _add_options(training, TRAIN_OPTIONS)
    training.set_defaults(run=_train)

    training_lm = commands.add_parser(
        "train-lm",
        help="train a language model on the characters of a text",
        description="Train a decoder-only language model to continue a text, character by "
        "character, with AdamW. The end of the text is held out of the training to measure the "
        "loss on. The options are by default those of nanoGPT's recipe for a CPU. " + SAVED,
        epilog="Example: npdecoder train-lm book.txt --out book.npz --steps 5000",
    )
    training_lm.add_argument("text", metavar="TEXT.txt", help="a UTF-8 text")
    training_lm.add_argument(
        "--out", default=LM_MODEL, metavar="MODEL.npz", help=_help("the model to write")
    )
    _add_options(training_lm, TRAIN_LM_OPTIONS)
    training_lm.set_defaults(run=_train_lm)

    translate = commands.add_parser(
        "translate",
        help="translate text with a trained model",
        description="Translate the given text, or each line of standard input. Words that the "
        "model does not know are named on stderr.",
        epilog=f'Example: npdecoder translate {DEMO_MODEL} "I love you" --attention',
    )
    translate.add_argument("model", metavar="MODEL.npz", help="made by demo or train")
    translate.add_argument("text", nargs="*", help="the text (default: lines of standard input)")
    translate.add_argument(
        "--beam", type=positive_int, default=1, metavar="K",
        help=_help("width of the beam search; 1 is greedy"),
    )  # fmt: skip
    translate.add_argument(
        "--attention", action="store_true",
        help="show what each word of the translation looked at, in percent",
    )  # fmt: skip
    translate.set_defaults(run=_translate)

    generating = commands.add_parser(
        "generate",
        help="continue a text with a trained language model",
        description="Print the prompt and what the model writes after it, as it comes. The same "
        "seed writes the same text.",
        epilog=f'Example: npdecoder generate {LM_MODEL} --prompt "ROMEO:" --temperature 0.8',
    )
    generating.add_argument("model", metavar="MODEL.npz", help="made by train-lm")
    generating.add_argument(
        "--prompt", help="the beginning (default: a new line, or what the model knows instead)"
    )
    for option, kind, default, text in (
        ("--length", positive_int, 500, "characters to write"),
        ("--temperature", float, 1.0, "below 1 more likely, above 1 more varied; 0: the likeliest"),
        ("--top-k", positive_int, None, "draw from the K likeliest characters"),
        ("--top-p", float, None, "draw from the likeliest that have this probability together"),
        ("--min-p", float, None, "draw from those this share as likely as the likeliest"),
        ("--seed", natural_int, 0, "of the draws"),
    ):
        generating.add_argument(
            option, type=kind, default=default, help=text if default is None else _help(text)
        )
    generating.set_defaults(run=_generate)

    tracing = commands.add_parser(
        "trace",
        help="see every number of one forward and one backward pass",
        description="Run one forward and one backward pass and show all that they compute, layer "
        "by layer: as a table, as one page for a browser (--html), or as arrays (--npz). Without "
        "sentences it is the worked example (I love you -> 我 爱 你) at a size that fits on paper; "
        "with two sentences a new model of their words at the same size, or a trained one.",
        epilog='Example: npdecoder trace "How are you" "你 好 吗" --html page.html',
    )
    tracing.add_argument("source", nargs="?", help="the source sentence (with --ids: ids, 2,5,3)")
    tracing.add_argument("target", nargs="?", help="its translation (with --ids: ids)")
    tracing.add_argument("--model", metavar="MODEL.npz", help="made by demo or train")
    tracing.add_argument("--ids", action="store_true", help="ids of the worked example's model")
    tracing.add_argument("--html", metavar="FILE", help="write the page")
    tracing.add_argument("--npz", metavar="FILE.npz", help="write the arrays by name")
    tracing.add_argument("--seed", type=natural_int, default=0, help=_help("of a new model"))
    tracing.set_defaults(run=_trace)

    check = commands.add_parser(
        "gradcheck",
        help="check the gradients of every layer, block and model",
        description="Compare every backward with central differences of its forward, in float64, "
        "for random weights, sizes, options and masks. Exit code 1 if one is wrong.",
    )
    check.add_argument("--seed", type=natural_int, default=0, help=_help("of all that is random"))
    check.set_defaults(run=_gradcheck)

    exercise_command.add_parser(commands)
    return parser


def _add_options(parser: argparse.ArgumentParser, table: Sequence[Option]) -> None:
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the training in the file --out, with its options, bit by bit as if it had "
        "never stopped; --steps may be more (the schedule is then that of the longer training)",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace the file --out if there is one"
    )
    parser.add_argument(
        "--threads",
        type=positive_int,
        metavar="N",
        help="cores that share out each batch (default: as many as its size is worth); the same "
        "number gives the same results, another one differs by rounding, and in its dropout",
    )
    for name, kind, default, text in table:
        shown = text if default is None else f"{text} (default: {default})"
        # only what was given: a resumed run has its own defaults
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=argparse.SUPPRESS, help=shown
        )


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


TRAIN_OPTIONS: tuple[Option, ...] = (
    ("d_model", positive_int, 128, "width of the model"),
    ("num_heads", positive_int, 4, "attention heads"),
    ("num_layers", positive_int, 2, "layers of the encoder, and of the decoder"),
    ("d_ff", positive_int, None, "width of the feed-forward (default: 4 d-model)"),
    ("dropout", float, 0.1, "rate of dropout"),
    ("steps", positive_int, 4000, "updates"),
    ("batch_size", positive_int, 64, "sentence pairs in a batch"),
    ("accumulate", positive_int, 1, "batches in an update"),
    ("lr", float, 0.5, "highest learning rate; warm-up, then a cosine down to 0"),
    ("warmup", natural_int, 200, "updates of the warm-up"),
    ("momentum", float, 0.9, "momentum of SGD"),
    ("weight_decay", float, 0.0, "weight decay of SGD"),
    ("max_norm", float, 1.0, "the gradient is clipped to this norm"),
    ("label_smoothing", float, 0.0, "label smoothing of the training loss"),
    ("min_count", positive_int, 2, "rarer words become <unk>"),
    ("max_len", positive_int, 64, "pairs with a longer sentence (in tokens) are left out"),
    ("held_out", float, 0.05, "share of the source sentences to hold out"),
    ("validate_every", positive_int, 500, "updates between two validations"),
    ("save_every", positive_int, 500, "updates between two saves"),
    ("seed", natural_int, 0, "of split, weights, batches and dropout"),
)
TRAIN_LM_OPTIONS: tuple[Option, ...] = (
    ("d_model", positive_int, 128, "width of the model"),
    ("num_heads", positive_int, 4, "attention heads"),
    ("num_layers", positive_int, 4, "layers"),
    ("d_ff", positive_int, None, "width of the feed-forward (default: 4 d-model)"),
    ("context", positive_int, 64, "characters that the model sees at once"),
    ("dropout", float, 0.0, "rate of dropout"),
    ("steps", positive_int, 2000, "updates"),
    ("batch_size", positive_int, 12, "pieces of text in a batch"),
    ("accumulate", positive_int, 1, "batches in an update"),
    ("lr", float, 1e-3, "highest learning rate; warm-up, then a cosine"),
    ("final_lr", float, 1e-4, "learning rate at the end"),
    ("warmup", natural_int, 100, "updates of the warm-up"),
    ("beta1", float, 0.9, "beta1 of AdamW"),
    ("beta2", float, 0.99, "beta2 of AdamW"),
    ("weight_decay", float, 0.1, "weight decay of AdamW, of matrices alone"),
    ("max_norm", float, 1.0, "the gradient is clipped to this norm"),
    ("held_out", float, 0.1, "share of the text, at its end, to hold out"),
    ("validate_every", positive_int, 250, "updates between two validations"),
    ("save_every", positive_int, 250, "updates between two saves"),
    ("seed", natural_int, 0, "of weights, batches and dropout"),
)


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = str(error) or type(error).__name__
    return " ".join(text.split())


def _show_warning(message: Warning | str, *details: Any, **more: Any) -> None:
    print(f"npdecoder: {' '.join(str(message).split())}", file=sys.stderr)


def _fit(
    out: str,
    pairs: Sequence[tuple[str, str]],
    held_out: Sequence[tuple[str, str]],
    o: dict[str, Any],
    checkpoint: Checkpoint | None = None,
    threads: int | None = None,
) -> tuple[Run, Sequence[PairOfIds]]:
    """The run that trains a Translator on pairs, before its training; held_out as ids."""
    if checkpoint is None:
        sources = Vocabulary.build((tokenize(s) for s, _ in pairs), o["min_count"])
        targets = Vocabulary.build((tokenize(t) for _, t in pairs), o["min_count"])
        config = TransformerConfig(
            len(sources),
            len(targets),
            pad_id=Vocabulary.pad_id,
            d_model=o["d_model"],
            num_heads=o["num_heads"],
            num_encoder_layers=o["num_layers"],
            num_decoder_layers=o["num_layers"],
            d_ff=o["d_ff"],
            dropout=o["dropout"],
            max_len=o["max_len"] + 1,  # and EOS
        )
        translator = Translator(Transformer(config, o["seed"]), sources, targets)
    else:
        translator = Translator.from_checkpoint(out, checkpoint)
    ids, held_out_ids = translator.encode_pairs(pairs), translator.encode_pairs(held_out)
    print(
        f"{len(pairs)} pairs to train on, {len(held_out)} held out; vocabularies of "
        f"{len(translator.source_vocabulary)} and {len(translator.target_vocabulary)}; "
        f"{translator.model.num_parameters():,} parameters",
        flush=True,
    )
    tokens = [i for pair in ids for side in pair for i in side]
    unknown = tokens.count(Vocabulary.unk_id) / max(len(tokens), 1)
    if unknown > 0.0:
        print(f"{100 * unknown:.1f} % of the words are too rare (--min-count) and become <unk>")
    run = Run(
        translator,
        out,
        o,
        SGD(translator.model.parameters(), o["lr"], o["momentum"], o["weight_decay"]),
        lambda rng: _batches(ids, o["batch_size"], rng),
        "\n".join(f"{source}\t{target}" for source, target in (*pairs, *held_out)),
        checkpoint,
        threads,
        (o["batch_size"], sum(len(t) + 1 for _, t in ids) // len(ids)),
    )
    return run, held_out_ids


def _learn_pairs(run: Run, held_out_ids: Sequence[PairOfIds]) -> None:
    o = run.options
    _say_resumed(run)
    run.train(
        CrossEntropy(ignore_index=Vocabulary.pad_id, label_smoothing=o["label_smoothing"]),
        cosine_schedule(o["lr"], o["steps"], min(o["warmup"], o["steps"])),
        (lambda: _loss(run.model, held_out_ids)) if held_out_ids else None,
    )


def _say_resumed(run: Run) -> None:
    if run.optimizer.steps:
        print(f"going on after update {run.optimizer.steps} of {run.options['steps']}", flush=True)


def _batches(pairs: Sequence[PairOfIds], size: int, rng: np.random.Generator | None) -> Any:
    return batches(
        pairs, size, rng, Vocabulary.pad_id, Vocabulary.bos_id, Vocabulary.eos_id
    )


def _loss(model: Callable[..., Array] | Replicas, pairs: Sequence[PairOfIds]) -> float:
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
    options = {name: default for name, _, default, _ in TRAIN_OPTIONS}
    options |= {"d_model": 64, "num_layers": 1, "dropout": 0.0, "max_len": 31, "min_count": 1}
    options |= {"batch_size": 32, "lr": 0.1, "warmup": 100, "validate_every": 100}
    options |= {"steps": args.steps, "seed": args.seed}
    run, held_out_ids = _fit(args.out, train_pairs, held_out, options, threads=1)
    _learn_pairs(run, held_out_ids)
    translator, progress = cast(Translator, run.product), run.progress
    print(f"loss {progress.loss:.4f}, on held-out phrases {progress.validation_loss:.4f}")

    some = held_out[:: max(1, len(held_out) // 5)][:5]
    report = _show(translator, [*some, ("I love you", "我 爱 你")])
    print(f"\nheld-out exact match: {100 * translator.exact_match(held_out):.1f} %")
    _conclude(report, args.out, f'translate {args.out} "I love you"')
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
    o, checkpoint = _begin(args, TRAIN_OPTIONS)
    pairs = read_pairs(args.pairs)
    fitting = [
        (source, target)
        for source, target in pairs
        if max(len(tokenize(source)), len(tokenize(target))) <= o["max_len"]
    ]
    if len(fitting) < len(pairs):
        print(f"{len(pairs) - len(fitting)} pairs are longer than {o['max_len']} tokens: left out")
    train_pairs, held_out = split_pairs(fitting, o["held_out"], o["seed"])
    if not train_pairs:
        raise ValueError(f"{args.pairs}: no pair is left to train on")
    run, held_out_ids = _fit(args.out, train_pairs, held_out, o, checkpoint, args.threads)
    _learn_pairs(run, held_out_ids)
    translator = cast(Translator, run.product)
    print(f"{run.progress.tokens_per_second():,.0f} target tokens/s", file=sys.stderr)
    report = _show(translator, (held_out or train_pairs)[:5])
    print(f"\ntraining loss {run.progress.loss:.4f}")
    if held_out_ids:
        loss = run.validation_loss(lambda: _loss(translator.model, held_out_ids))
        print(f"validation loss {loss:.4f}")
        print(f"  of word frequencies alone {_unigram_loss(translator, train_pairs, held_out):.4f}")
        print(f"  with the source hidden    {_loss(_blind(translator.model), held_out_ids):.4f}")
        print(f"held-out exact match: {100 * translator.exact_match(held_out[:500]):.1f} %"
              + (" (of the first 500)" if len(held_out) > 500 else ""))
    _conclude(report, args.out, f'translate {args.out} "I love you"')
    return 0 if report.ok else 1


def _begin(
    args: argparse.Namespace, table: Sequence[Option]
) -> tuple[dict[str, Any], Checkpoint | None]:
    """The options of the run, and the checkpoint to go on with if there is --resume."""
    check_writable(args.out)
    given = {name: getattr(args, name) for name, *_ in table if hasattr(args, name)}
    options, checkpoint = {**{name: default for name, _, default, _ in table}, **given}, None
    if os.path.exists(args.out) and not (args.resume or args.force):
        raise ValueError(f"{args.out} exists: --resume goes on with the training in it, --force "
                         "begins anew and replaces it")
    if args.resume:
        checkpoint = load_checkpoint(args.out)
        resumed = resumed_options(args.out, checkpoint, given)
        if differing := sorted(resumed.keys() ^ options.keys()):
            raise ValueError(f"{args.out} is of another kind of training, or of another version, "
                             f"by the options {', '.join(differing)}")
        options = resumed
    if not 0.0 <= options["held_out"] < 1.0:
        raise ValueError(f"held_out is {options['held_out']}, expected a share in [0, 1)")
    return options, checkpoint


def _train_lm(args: argparse.Namespace) -> int:
    o, checkpoint = _begin(args, TRAIN_LM_OPTIONS)
    text = read_text(args.text)
    if not text:
        raise ValueError(f"{args.text} is empty")
    if checkpoint is not None:
        refuse_other_text(args.out, checkpoint, fingerprint(text))
    cut = round((1.0 - o["held_out"]) * len(text))
    if checkpoint is None:
        characters = Characters.build(text)
        config = LanguageModelConfig(
            len(characters),
            d_model=o["d_model"],
            num_heads=o["num_heads"],
            num_layers=o["num_layers"],
            d_ff=o["d_ff"],
            norm_bias=False,
            feed_forward_bias=False,
            output_bias=False,
            activation="gelu",
            dropout=o["dropout"],
            max_len=o["context"],
            positions="learned",
            scale_embeddings=False,
            tie_embeddings="target_output",
        )
        product = CharacterModel(LanguageModel(config, o["seed"]), characters)
    else:
        product = CharacterModel.from_checkpoint(args.out, checkpoint)
    model, ids = product.model, product.characters.encode(text)
    train_ids, held_out = ids[:cut], ids[cut:]
    print(
        f"{len(train_ids):,} characters to train on, {len(held_out):,} held out, "
        f"{len(product.characters)} different; {model.num_parameters():,} parameters",
        flush=True,
    )
    run = Run(
        product,
        args.out,
        o,
        AdamW(
            decay_groups(model.parameters(), o["weight_decay"]), o["lr"], (o["beta1"], o["beta2"])
        ),
        lambda rng: windows(train_ids, o["context"], o["batch_size"], rng),
        text,
        checkpoint,
        args.threads,
        (o["batch_size"], o["context"]),
    )

    def validate() -> float:
        threads = run.model.threads if isinstance(run.model, Replicas) else 1
        # then what one layer leaves to the next is in a core's cache
        size = threads * max(1, 1000 // o["context"])
        return evaluate(run.model, CrossEntropy(), windows(held_out, o["context"], size, None))

    _say_resumed(run)
    schedule = cosine_schedule(o["lr"], o["steps"], min(o["warmup"], o["steps"]), o["final_lr"])
    run.train(CrossEntropy(), schedule, validate if len(held_out) > 1 else None)
    print(f"{run.progress.tokens_per_second():,.0f} tokens/s", file=sys.stderr)

    some = train_ids[None, : min(o["context"], 16)]
    report = gradcheck(copy.deepcopy(model).astype(np.float64), some, mode="directional")
    print(f"\nThe gradients, against central differences in float64:\n\n{report}")
    print("\nA sample:\n")
    prompt = _first_line(product)
    print(prompt.strip() + "".join(product.generate(prompt, max_new_tokens=300, seed=o["seed"])))
    print(f"\ntraining loss {run.progress.loss:.4f}")
    if len(held_out) > 1:
        frequencies = np.bincount(train_ids, minlength=len(product.characters)) + 1.0
        log_p = np.log(frequencies / frequencies.sum())
        print(f"validation loss {run.validation_loss(validate):.4f}")
        print(f"  of character frequencies alone {-log_p[held_out[1:]].mean():.4f}")
    _conclude(report, args.out, f"generate {args.out}")
    return 0 if report.ok else 1


def _conclude(report: GradcheckReport, out: str, command: str) -> None:
    print(
        f"gradients: {'all right' if report.ok else 'WRONG'}, "
        f"largest relative error {report.max_relative_error:.0e}"
    )
    print(f"saved: {out}  (try: npdecoder {command})")


def _translate(args: argparse.Namespace) -> int:
    translator = Translator.load(args.model)
    if args.text:
        print(_translation(translator, " ".join(args.text), args))
        return 0
    if sys.stdin is None:
        raise ValueError("there is no text: give it as an argument or on standard input")
    code = 0
    for line in sys.stdin:
        text = line.lstrip("\ufeff").strip()  # a byte order mark, if the lines come from a file
        try:
            print(_translation(translator, text, args) if text else "", flush=True)
        except ValueError as error:  # of this line; the next may be well
            print(f"npdecoder: error: {_one_line(error)}", file=sys.stderr)
            print(flush=True)
            code = 2
    return code


def _translation(translator: Translator, text: str, args: argparse.Namespace) -> str:
    if not args.attention:
        return translator.translate([text], args.beam)[0]
    alignment = translator.align(text, args.beam)
    words = [token for token in alignment.target_tokens if token != "<eos>"]
    names = alignment.target_tokens, alignment.source_tokens
    return f"{detokenize(words)}\n{console.weight_map(*names, alignment.A)}"


def _first_line(product: CharacterModel) -> str:
    """A new line, as before a beginning; of a text without one its lowest character."""
    known = product.characters.characters
    return "\n" if "\n" in known else known[0]


def _generate(args: argparse.Namespace) -> int:
    product = CharacterModel.load(args.model)
    prompt = _first_line(product) if args.prompt is None else args.prompt
    characters = product.generate(
        prompt,
        max_new_tokens=args.length,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
    )
    print(prompt, end="", flush=True)
    for character in characters:
        print(character, end="", flush=True)
    print()
    return 0


def _trace(args: argparse.Namespace) -> int:
    if (args.source is None) != (args.target is None):
        raise ValueError("give two sentences, or none")
    if args.source is None:
        if args.model or args.ids:
            raise ValueError("give the two sentences (or ids) that the model shall read")
        traced = worked_example()
    elif args.ids:
        if args.model:
            raise ValueError("--ids are for the worked example's model: leave one of the two out")
        traced = worked_example((_id_list(args.source), _id_list(args.target)))
    elif args.model:
        traced = translated(Translator.load(args.model), args.source, args.target)
    else:
        traced = sentence_pair(args.source, args.target, args.seed)
    if args.npz:
        traced.trace.save(args.npz)
        print(f"saved: {args.npz}")
    if args.html:
        write_page(args.html, traced.trace, traced.tokens, f"{traced.title} · npdecoder")
        print(f"{len(traced.trace)} steps, loss {traced.loss:.4f}")
        print(f"saved: {args.html}  (open it in a browser)")
    if not (args.npz or args.html):
        print(traced.trace)
    return 0


def _id_list(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"{text!r} is no list of ids: give them as 2,5,3") from None


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


