"""A CPU stub for transformer_engine's FusedAdam, sufficient for Megatron's (distributed) optimizer:
lr may be None, fp32 math, group['step'], decoupled grads, fp32 main parameters, (un)scaled state accessors."""

import torch


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        amsgrad=False,
        *,
        capturable=False,
        master_weights=False,
        use_decoupled_grad=False,
        store_param_remainders=False,
        master_weight_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        set_grad_none=None,
        **kw,
    ):
        super().__init__(
            params,
            {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay},
        )
        self.adam_w_mode, self.master_weights, self.use_decoupled_grad = adam_w_mode, master_weights, use_decoupled_grad
        self.exp_avg_dtype, self.exp_avg_sq_dtype = exp_avg_dtype, exp_avg_sq_dtype
        self.store_param_remainders = store_param_remainders and master_weights

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        if self.use_decoupled_grad:
            for g in self.param_groups:
                for p in g["params"]:
                    p.decoupled_grad = None

    def initialize_state(self, p, store_param_remainders=False):
        s = self.state[p]
        s["exp_avg"] = torch.zeros_like(p, dtype=self.exp_avg_dtype)
        s["exp_avg_sq"] = torch.zeros_like(p, dtype=self.exp_avg_sq_dtype)
        if self.master_weights:
            s["master_param"] = p.detach().clone().float()
        if self._keeps_remainders(p):
            s["master_param"] = torch.zeros_like(p, dtype=torch.int16)

    def _keeps_remainders(self, p, name="master_param"):
        return name == "master_param" and self.store_param_remainders and p.dtype == torch.bfloat16

    def get_unscaled_state(self, p, name):
        return self.state[p][name] if self._keeps_remainders(p, name) else self.state[p][name].float()

    def set_scaled_state(self, p, name, v):
        assert (v.dtype == torch.int16) == self._keeps_remainders(p, name)
        if name not in self.state[p]:
            self.initialize_state(p)
        self.state[p][name].copy_(v)

    def load_state_dict(self, state_dict):
        """Keep the states' dtypes as Transformer Engine does; torch casts them to the parameter's dtype."""
        super().load_state_dict(state_dict)
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for name, param in zip(names, params, strict=True):
            if name in state_dict["state"]:
                saved = state_dict["state"][name].items()
                self.state[param] = {k: v.clone() if torch.is_tensor(v) else v for k, v in saved}

    @torch.no_grad()
    def step(self, closure=None, **kw):
        for g in self.param_groups:
            if not g["params"]:
                continue
            g["step"] = g.get("step", 0) + 1
            b1, b2 = g["betas"]
            for p in g["params"]:
                gr = getattr(p, "decoupled_grad", None) if self.use_decoupled_grad else p.grad
                if gr is None:
                    continue
                s = self.state[p]
                if len(s) == 0:
                    self.initialize_state(p)
                w = s["master_param"] if self.master_weights else p
                if self._keeps_remainders(p):
                    w = joined(p, s["master_param"])
                gr = gr.float()
                m = s["exp_avg"].float().mul_(b1).add_(gr, alpha=1 - b1)
                v = s["exp_avg_sq"].float().mul_(b2).addcmul_(gr, gr, value=1 - b2)
                s["exp_avg"].copy_(m)
                s["exp_avg_sq"].copy_(v)
                c1, c2 = (1 - b1 ** g["step"], 1 - b2 ** g["step"]) if g["bias_correction"] else (1.0, 1.0)
                d = (v / c2).sqrt_().add_(g["eps"])
                x = w.float()
                if self.adam_w_mode:
                    x = x * (1 - g["lr"] * g["weight_decay"])
                x = x.addcdiv(m, d, value=-g["lr"] / c1)
                if self._keeps_remainders(p):
                    split(x, p, s["master_param"])
                    continue
                w.copy_(x)
                if self.master_weights:
                    p.copy_(w)


def joined(weight, remainder):
    """The fp32 value of a bf16 weight and its 16-bit remainder; negative remainders were rounded up."""
    high = weight.view(torch.int16).int() - (remainder < 0).int()
    return ((high << 16) | (remainder.int() & 0xFFFF)).view(torch.float32)


def split(value, weight, remainder):
    bits = value.contiguous().view(torch.int32)
    remainder.copy_(bits.to(torch.int16))  # the lower half
    weight.copy_(((bits >> 16) + (remainder < 0).int()).to(torch.int16).view(torch.bfloat16))


class FusedSGD(torch.optim.SGD):
    pass


def patch_megatron():
    """Make megatron.core.optimizer use this stub as TE's FusedAdam (as in upstream CI), without a stub of TE."""
    import megatron.core.optimizer as mo
    import megatron.core.optimizer.distrib_optimizer as do

    mo.Adam = FusedAdam
    mo.SGD = FusedSGD
    if hasattr(mo, "USING_PYTORCH_OPTIMIZER"):
        mo.USING_PYTORCH_OPTIMIZER = False
    do.Adam = FusedAdam
    do.HAVE_APEX_OR_TE = True
    do.USING_TE_OPTIMIZER = True
