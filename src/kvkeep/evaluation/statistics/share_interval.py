"""An interval for a mean that lies between 0 and 1, and so does the interval."""

from __future__ import annotations

import math

ROUNDING = 1e-12  # a standard error below it comes from adding the same shares in another order


def share_interval(estimate: float, error: float, clusters: int, reach: float) -> tuple[float, float]:
    """Wilson's interval with the number of observations that the spread is worth.

    All shares ``s`` with ``|estimate - s| <= reach * sqrt(s (1 - s) / n)``, where ``n`` is the number of
    independent yes-or-no observations that would have this standard error: clustering, draws and partial
    credit are in it. In the middle it is the symmetric interval, near 0 and 1 it leans inwards.

    Parameters
    ----------
    estimate
        Mean over problems, in [0, 1].
    error
        Its standard error over clusters.
    clusters
        What ``n`` is where nothing varies, so that the spread says nothing: one observation a cluster.
    reach
        Standard errors that the interval reaches: a quantile of Student's t with ``clusters - 1`` degrees of
        freedom.

    Source
    ------
    Wilson, J. Am. Stat. Assoc. 22 (1927), 209; with an effective number of observations: Kott and Carr,
    J. Off. Stat. 13 (1997), 139, and Franco et al., J. Surv. Stat. Methodol. 7 (2019), 334.

    Deviations
    ----------
    They know yes-or-no answers only. Where each problem gives a share with little spread, ``n`` is larger
    than the number of problems.
    """
    varies = error > ROUNDING and 0 < estimate < 1
    observations = estimate * (1 - estimate) / error**2 if varies else clusters
    weight = reach**2 / observations
    middle = (estimate + weight / 2) / (1 + weight)
    spread = estimate * (1 - estimate) / observations + (reach / (2 * observations)) ** 2
    half = reach / (1 + weight) * math.sqrt(spread)
    return max(0.0, min(middle - half, estimate)), min(1.0, max(middle + half, estimate))  # rounding
