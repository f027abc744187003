"""A CPU stub for Apex's fused optimizers, as far as Megatron's optimizers look at them."""

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
        set_grad_none=True,
        capturable=False,
        master_weights=False,
        **kw,
    ):
        super().__init__(
            params,
            {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay},
        )

    @torch.no_grad()
    def step(self, closure=None, **kw):
        for g in self.param_groups:
            if len(g["params"]) == 0:
                continue
            g["step"] = g.get("step", 0) + 1
            b1, b2 = g["betas"]
            for p in g["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if len(s) == 0:
                    s["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                    s["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
                gr = p.grad.float()
                s["exp_avg"].mul_(b1).add_(gr, alpha=1 - b1)
                s["exp_avg_sq"].mul_(b2).addcmul_(gr, gr, value=1 - b2)
                d = (s["exp_avg_sq"] / (1 - b2 ** g["step"])).sqrt() + g["eps"]
                p.mul_(1 - g["lr"] * g["weight_decay"]).addcdiv_(
                    s["exp_avg"], d, value=-g["lr"] / (1 - b1 ** g["step"])
                )


class FusedSGD(torch.optim.SGD):
    pass
