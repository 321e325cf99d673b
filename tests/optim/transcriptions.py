"""What was published, transcribed: float64 and plain loops."""

from __future__ import annotations

import math

import numpy as np

from tests.optim.rule_gradients import COLUMNS, ROWS, IndexedGrad, Table, start


def rowwise_adagrad(
    grads: list[IndexedGrad], *, lr, eps, weight_decay=0.0, decoupled=False, initial=0.0
) -> tuple[Table, dict[str, Table]]:
    """FBGEMM's EXACT_ROWWISE_ADAGRAD."""
    p, s = start(), np.full(ROWS, initial)
    for touched in grads:
        for row, g in touched.items():
            if decoupled:
                p[row] *= 1 - lr * weight_decay
            else:
                g = g + weight_decay * p[row]
            s[row] += sum(float(x) ** 2 for x in g) / COLUMNS
            for j in range(COLUMNS):
                p[row, j] -= lr / (math.sqrt(s[row]) + eps) * g[j]
    return p, {"sum": s}


def rowwise_adam(
    grads: list[IndexedGrad], *, lr, betas, eps, weight_decay=0.0, decoupled=False, per_row=False
) -> tuple[Table, dict[str, Table]]:
    """FBGEMM's PARTIAL_ROWWISE_ADAM; the count is the table's or the row's own."""
    b1, b2 = betas
    p, m, v, counts = start(), np.zeros((ROWS, COLUMNS)), np.zeros(ROWS), np.zeros(ROWS)
    for step, touched in enumerate(grads, start=1):
        for row, g in touched.items():
            counts[row] += 1
            t = counts[row] if per_row else step
            if decoupled:
                p[row] *= 1 - lr * weight_decay
            else:
                g = g + weight_decay * p[row]
            v[row] = b2 * v[row] + (1 - b2) * sum(float(x) ** 2 for x in g) / COLUMNS
            for j in range(COLUMNS):
                m[row, j] = b1 * m[row, j] + (1 - b1) * g[j]
                m_hat, v_hat = m[row, j] / (1 - b1**t), v[row] / (1 - b2**t)
                p[row, j] -= lr * m_hat / (math.sqrt(v_hat) + eps)
    kept = {"exp_avg": m, "exp_avg_sq": v}
    return p, {**kept, "row_step": counts} if per_row else kept


def lion(
    grads: list[IndexedGrad], *, lr, betas, weight_decay=0.0
) -> tuple[Table, dict[str, Table]]:
    """Chen et al., algorithm 2."""
    b1, b2 = betas
    p, m = start(), np.zeros((ROWS, COLUMNS))
    for touched in grads:
        for row, g in touched.items():
            for j in range(COLUMNS):
                c = b1 * m[row, j] + (1 - b1) * g[j]
                sign = np.sign(c)
                p[row, j] -= lr * (sign + weight_decay * p[row, j])
                m[row, j] = b2 * m[row, j] + (1 - b2) * g[j]
    return p, {"exp_avg": m}


def ftrl(
    grads: list[IndexedGrad], *, lr, beta, l1, l2, initial=0.0
) -> tuple[Table, dict[str, Table]]:
    """McMahan et al., algorithm 1: weights are not stored but follow from z and n."""
    z, n = np.zeros((ROWS, COLUMNS)), np.full((ROWS, COLUMNS), initial)

    def weight(row: int, j: int) -> float:
        at = z[row, j]
        if abs(at) <= l1:
            return 0.0
        sign = np.sign(at)
        return -(at - sign * l1) / ((beta + math.sqrt(n[row, j])) / lr + l2)

    for touched in grads:
        for row, g in touched.items():
            for j in range(COLUMNS):
                w = weight(row, j)
                sigma = (math.sqrt(n[row, j] + g[j] ** 2) - math.sqrt(n[row, j])) / lr
                z[row, j] += g[j] - sigma * w
                n[row, j] += g[j] ** 2
    p = np.array([[weight(row, j) for j in range(COLUMNS)] for row in range(ROWS)])
    return p, {"linear": z, "sum": n}


def adagrad(
    grads: list[IndexedGrad], *, lr, lr_decay, eps, weight_decay=0.0, initial=0.0
) -> tuple[Table, dict[str, Table]]:
    """Duchi et al. with torch's decaying rate: the count is the table's."""
    p, s = start(), np.full((ROWS, COLUMNS), initial)
    for step, touched in enumerate(grads, start=1):
        rate = lr / (1 + (step - 1) * lr_decay)
        for row, g in touched.items():
            for j in range(COLUMNS):
                d = g[j] + weight_decay * p[row, j]
                s[row, j] += d * d
                p[row, j] -= rate * d / (math.sqrt(s[row, j]) + eps)
    return p, {"sum": s}


def momentum(
    grads: list[IndexedGrad], *, lr, mu, tau, nesterov=False
) -> tuple[Table, dict[str, Table]]:
    """Torch's SGD: the parameter's first step takes the gradient whole, later ones are damped."""
    p, b = start(), np.zeros((ROWS, COLUMNS))
    for step, touched in enumerate(grads, start=1):
        for row, g in touched.items():
            b[row] = g if step == 1 else mu * b[row] + (1 - tau) * g
            p[row] -= lr * (g + mu * b[row]) if nesterov else lr * b[row]
    return p, {"momentum_buffer": b}


def amsgrad(grads: list[IndexedGrad], *, lr, betas, eps) -> tuple[Table, dict[str, Table]]:
    """Reddi et al. as torch has it: the maximum is of the average as kept, before correction."""
    b1, b2 = betas
    p = start()
    m, v, top = (np.zeros((ROWS, COLUMNS)) for _ in range(3))
    for t, touched in enumerate(grads, start=1):
        for row, g in touched.items():
            m[row] = b1 * m[row] + (1 - b1) * g
            v[row] = b2 * v[row] + (1 - b2) * g**2
            top[row] = np.maximum(top[row], v[row])
            root = np.sqrt(top[row] / (1 - b2**t))
            p[row] -= lr * (m[row] / (1 - b1**t)) / (root + eps)
    return p, {"exp_avg": m, "exp_avg_sq": v, "max_exp_avg_sq": top}


def radam(
    grads: list[IndexedGrad], *, lr, betas, eps, weight_decay=0.0, decoupled=False
) -> tuple[Table, dict[str, Table]]:
    """Liu et al., algorithm 2, as torch has it: with eps, and from a length of 5 on, not 4."""
    b1, b2 = betas
    p, m, v = start(), np.zeros((ROWS, COLUMNS)), np.zeros((ROWS, COLUMNS))
    longest = 2 / (1 - b2) - 1
    for t, touched in enumerate(grads, start=1):
        length = longest - 2 * t * b2**t / (1 - b2**t)
        for row, g in touched.items():
            if decoupled:
                p[row] *= 1 - lr * weight_decay
            else:
                g = g + weight_decay * p[row]
            m[row] = b1 * m[row] + (1 - b1) * g
            v[row] = b2 * v[row] + (1 - b2) * g**2
            m_hat = m[row] / (1 - b1**t)
            if length <= 5:
                p[row] -= lr * m_hat
                continue
            scale = math.sqrt(1 - b2**t) / (np.sqrt(v[row]) + eps)
            above = (length - 4) * (length - 2) * longest
            rect = math.sqrt(above / ((longest - 4) * (longest - 2) * length))
            p[row] -= lr * rect * m_hat * scale
    return p, {"exp_avg": m, "exp_avg_sq": v}
