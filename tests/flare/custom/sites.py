"""Executors of the tests: sites that reply with known models, and one fault each where told so."""

# pyright: reportMissingTypeStubs=false

import os
import signal
import time
from typing import Any

import numpy as np
import torch
from arithmetic import number, trained, weight
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

WEIGHT = "NUM_STEPS_CURRENT_ROUND"


class Site(Executor):
    """Replies with full weights, or with differences; `faults` says which site fails how."""

    def __init__(self, diff: bool = False, faults: dict[str, str] | None = None) -> None:
        super().__init__()
        self.diff, self.faults = diff, faults or {}

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """One task."""
        model: Any = FLModelUtils.from_shareable(shareable)
        site, t = str(fl_ctx.get_identity_name()), model.current_round
        torches = isinstance(next(iter(model.params.values())), torch.Tensor)
        sent = {name: np.asarray(value) for name, value in model.params.items()}
        params: dict[str, Any] = dict(trained(sent, number(site), t))
        if self.diff:
            params = {name: value - sent[name] for name, value in params.items()}
        if torches:
            params = {name: torch.from_numpy(np.array(value)) for name, value in params.items()}
        meta: dict[str, Any] = {WEIGHT: weight(number(site))}
        if fault := self.faults.get(site):
            reply = getattr(self, fault)(params, meta)
            if reply is not None:
                return reply
        metrics = {"accuracy": 0.5, "loss": float(number(site))}
        kind = ParamsType.DIFF if self.diff else ParamsType.FULL
        reply = FLModel(params_type=kind, params=params, metrics=metrics, meta=meta)
        return FLModelUtils.to_shareable(reply)

    # The faults.

    def nan(self, params: Any, meta: Any) -> None:
        first = next(iter(params))
        params[first] = params[first] * float("nan")

    def huge(self, params: Any, meta: Any) -> None:
        first = next(iter(params))
        params[first] = params[first] * 1e9

    def broadcast(self, params: Any, meta: Any) -> None:
        first = next(iter(params))
        params[first] = params[first][:1]

    def missing(self, params: Any, meta: Any) -> None:
        del params[next(iter(params))]

    def extra(self, params: Any, meta: Any) -> None:
        params["another"] = params[next(iter(params))]

    def integers(self, params: Any, meta: Any) -> None:
        first = next(iter(params))
        params[first] = np.asarray(params[first]).astype(np.int64)

    def no_dict(self, params: Any, meta: Any) -> Shareable:
        return FLModelUtils.to_shareable(FLModel(params=[1.0, 2.0], meta=meta))

    def negative(self, params: Any, meta: Any) -> None:
        meta[WEIGHT] = -3

    def no_number(self, params: Any, meta: Any) -> None:
        meta[WEIGHT] = "many"

    def raises(self, params: Any, meta: Any) -> None:
        raise RuntimeError("the disk is gone")

    def no_model(self, params: Any, meta: Any) -> Shareable:
        return make_reply("OK")

    def hangs(self, params: Any, meta: Any) -> None:
        time.sleep(45)

    def dies(self, params: Any, meta: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def slowly(self, params: Any, meta: Any) -> None:
        time.sleep(1.5)
