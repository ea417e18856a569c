"""Typical mistakes: exercise, what a solution's backward says, and what a reader might write."""

MISTAKES = [
    # linear
    ("01_linear", "dy.sum(axis=(0, 1))", "dy.sum(axis=0).mean(axis=0)"),
    ("01_linear", "dy.sum(axis=(0, 1))", "dy.sum(axis=0)"),
    ("01_linear", "self.W.grad +=", "self.W.grad ="),
    ("01_linear", "self.W.grad +=", "_ ="),
    ("01_linear", "dy @ self.W.value.T", "dy @ self.W.value"),
    ("01_linear", "dy @ self.W.value.T", "dy @ self.W.value.T / len(dy)"),
    ("01_linear", "return dy @", "return x @ self.W.value @"),
    ("01_linear", "x = ctx", "x = ctx\n        dy *= 1.0 + 1e-3"),
    # softmax
    ("02_softmax", "(dy - (dy * y).sum(axis=-1, keepdims=True))", "(1 - y) * dy"),
    ("02_softmax", "sum(axis=-1", "sum(axis=0"),
    ("02_softmax", "sum(axis=-1", "mean(axis=-1"),
    ("02_softmax", "return y *", "return y / len(y) *"),
    # layer norm
    ("03_layer_norm", "dx_hat = dy * self.gamma.value", "dx_hat = dy"),
    ("03_layer_norm", "(dx_hat * x_hat).mean(", "(dy * x_hat).mean("),
    ("03_layer_norm", "(dx_hat * x_hat).mean(", "(dx_hat * x_hat).sum("),
    ("03_layer_norm", "return dxc - dxc.mean(axis=-1, keepdims=True)", "return dxc"),
    ("03_layer_norm", "self.beta.grad += dy.sum", "self.beta.grad += (dy * x_hat).sum"),
    ("03_layer_norm", "(dy * x_hat).sum(axis=(0, 1))", "(dy * x_hat).mean(axis=(0, 1))"),
    # cross-entropy
    ("04_cross_entropy", "dloss / N", "dloss"),
    ("04_cross_entropy", "dloss / N", "1.0 / N"),
    ("04_cross_entropy", "dloss / N", "dloss / counted.size"),
    ("04_cross_entropy", "dloss / N", "dloss / len(counted)"),
    ("04_cross_entropy", " * counted[..., None]", ""),
    ("04_cross_entropy", "np.exp(log_p) - onehot", "onehot - np.exp(log_p)"),
    ("04_cross_entropy", "np.exp(log_p) - onehot", "log_p - onehot"),
    # residual
    ("05_residual", "dx1 = dy + da2", "dx1 = da2"),
    ("05_residual", "return dx1 + da1", "return dy + da1"),
    ("05_residual", "return dx1 + da1", "return 2 * dx1 + da1"),
    ("05_residual", "da1 = dx1 *", "da1 = dy *"),
    ("05_residual", "dy * (1 - s2 * s2)", "dy * (1 - s2)"),
    ("05_residual", "self.W2.grad += x1", "self.W2.grad += x"),
    # attention
    ("06_attention", "dS = dS / np.sqrt(q.shape[-1])", "pass"),
    ("06_attention", "np.sqrt(q.shape[-1])", "np.sqrt(v.shape[-1])"),
    ("06_attention", "A * (dA - (dA * A).sum(axis=-1, keepdims=True))", "A * (1 - A) * dA"),
    ("06_attention", "sum(axis=-1, ", "sum(axis=-2, "),
    ("06_attention", "return dS @ k, dS.swapaxes(-1, -2) @ q, dv",
     "return dS.swapaxes(-1, -2) @ q, dS @ k, dv"),
    ("06_attention", "A.swapaxes(-1, -2) @ dy", "dA.swapaxes(-1, -2) @ dy"),
    # multi-head attention
    ("07_multi_head_attention", "(self.W_q, dQ), (self.W_k, dK)", "(self.W_q, dK), (self.W_k, dQ)"),
    ("07_multi_head_attention", "dx += drows", "dx = drows"),
    ("07_multi_head_attention", " / np.sqrt(Q.shape[-1])", " / np.sqrt(x.shape[-1])"),
    ("07_multi_head_attention", "split(dy @ self.W_o.value.T, self.num_heads)",
     "(dy @ self.W_o.value.T).reshape(*A.shape[:3], -1)"),
    # shared memory
    ("08_shared_memory", "dK += dS", "dK = dS"),
    ("08_shared_memory", "dx = dx + dQ", "dx = dQ"),
    ("08_shared_memory", "layers[::-1]", "layers"),
    ("08_shared_memory", "return dx, dK @ self.W_k.value.T +", "return dx,"),
    ("08_shared_memory", "W_q.grad += product(x, dQ)", "W_q.grad = product(x, dQ)"),
    # tied embeddings
    ("09_tied_embeddings", "np.add.at(self.W.grad, ids, np.sqrt(d) * (da @ self.U.value.T))",
     "self.W.grad[ids] += np.sqrt(d) * (da @ self.U.value.T)"),
    ("09_tied_embeddings", "np.add.at(", "_ = ("),
    ("09_tied_embeddings", "self.W.grad += dy", "_ = dy"),
    ("09_tied_embeddings", "np.sqrt(d) * (da", "(da"),
    ("09_tied_embeddings", "return ()", "return dh"),
]  # fmt: skip
