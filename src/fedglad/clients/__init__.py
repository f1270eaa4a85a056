"""Client methods: the one local training loop, and one small file a method.

May import records, rng and layout; imported by the engines. A method corrects each minibatch
gradient ∇ and may keep vectors with each client and at the server:

| name | gradient of a step | kept | reference |
|---|---|---|---|
| plain | ∇ | – | FedAvg, McMahan et al. 2017 |
| fedsgd | ∇F_k(θ), once | – | McMahan et al. 2017 |
| fedprox | ∇ + μ(w − θ) | – | Li et al. 2020 |
| scaffold | ∇ − c_k + c | c_k, c | Karimireddy et al. 2020 |
| feddyn | ∇ − λ_k + α(w − θ) | λ_k, h | Acar et al. 2021 |
| fednova | ∇, then g_k/a_k | – | Wang et al. 2020 |
| vrl-sgd | ∇ − Δ_k | Δ_k | Liang et al. 2019 |
"""

REGISTRY = {
    "plain": "fedglad.clients.loop:Plain",
    "fedsgd": "fedglad.clients.fedsgd:FedSGD",
    "fedprox": "fedglad.clients.fedprox:FedProx",
    "scaffold": "fedglad.clients.scaffold:Scaffold",
    "feddyn": "fedglad.clients.feddyn:FedDyn",
    "fednova": "fedglad.clients.fednova:FedNova",
    "vrl-sgd": "fedglad.clients.vrl_sgd:VRLSGD",
}
