"""Which parameter goes where, said aloud; and one step for all optimizers or none."""

import copy
import io
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from muon_lab import optim, polar
from muon_lab.optim import matrices, routing
from muon_lab.optim.routing import Joint, Rule, split
from muon_lab.problems.models import GPT, GPTConfig


def made(layer, *arguments, **options):
    """Return a layer of ones; its usual initialisation would move the global generator."""
    built = nn.utils.skip_init(layer, *arguments, **options)
    for p in built.parameters():
        nn.init.ones_(p)
    return built


def small_gpt():
    return GPT(GPTConfig(width=8, depth=1, heads=2, context=4), torch.Generator().manual_seed(0))


def routes_of(**modules):
    options = modules.pop("options", {})
    return split(nn.ModuleDict(modules), show=None, **options)


def destinations(routes):
    return {route.site.names[0]: route.to for route in routes.routes}


def optimizers(**settings):
    return {
        "matrix": partial(optim.Muon, **{"lr": 0.1, **settings}),
        "other": partial(torch.optim.AdamW, lr=0.01),
    }


# --- rules ------------------------------------------------------------------------------------------------------------


def test_the_small_gpt():
    found = destinations(split(small_gpt(), show=None))
    hidden = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    assert {name for name, to in found.items() if to == "matrix"} == {f"blocks.0.{name}.weight" for name in hidden}
    assert set(found.values()) == {"matrix", "other"}
    assert list(found) == [name for name, _ in small_gpt().named_parameters()]


def test_embeddings_are_told_by_their_type():
    """Their names say nothing, and their shape is that of a matrix."""
    routes = routes_of(a=made(nn.Embedding, 5, 4), b=made(nn.EmbeddingBag, 5, 4), c=made(nn.Linear, 5, 4, bias=False))
    assert destinations(routes) == {"a.weight": "other", "b.weight": "other", "c.weight": "matrix"}


def test_a_tied_weight_goes_once_to_where_the_embedding_goes():
    table, out = made(nn.Embedding, 5, 4), made(nn.Linear, 4, 5, bias=False)
    for order in ({"table": table, "out": out}, {"out": out, "table": table}):
        out.weight = table.weight
        routes = routes_of(**order)
        (route,) = routes.routes
        assert (route.to, route.reason) == ("other", "embedding")
        assert set(route.site.names) == {"table.weight", "out.weight"}
        assert "tied with" in str(routes)


def test_a_module_used_twice_is_one_parameter():
    layer = made(nn.Linear, 3, 3, bias=False)
    (route,) = routes_of(first=layer, second=layer).routes
    assert route.site.names == ("first.weight", "second.weight")


@pytest.mark.parametrize("path", routing.HEADS)
def test_heads_are_told_by_name(path):
    routes = routes_of(**{path: made(nn.Linear, 4, 5), "layer": made(nn.Linear, 4, 5)})
    assert destinations(routes)[f"{path}.weight"] == "other"
    assert destinations(routes)["layer.weight"] == "matrix"


def test_heads_of_known_models_are_among_them():
    """GPT-NeoX and models that answer questions; what hidden layers are called too is not."""
    assert {"embed_out", "qa_outputs"} < set(routing.HEADS)
    routes = routes_of(fc=made(nn.Linear, 4, 5, bias=False), output=made(nn.Linear, 4, 5, bias=False))
    assert set(destinations(routes).values()) == {"matrix"}


def test_heads_may_be_named_otherwise():
    routes = routes_of(head=made(nn.Linear, 4, 5), logits=made(nn.Linear, 4, 5), options={"heads": ["logits"]})
    assert destinations(routes)["head.weight"] == "matrix"
    assert destinations(routes)["logits.weight"] == "other"


def test_norms_and_biases_go_to_the_other_whatever_their_shape():
    routes = routes_of(
        flat=made(nn.LayerNorm, 4),
        wide=made(nn.LayerNorm, (4, 3)),
        rms=made(nn.RMSNorm, (2, 3)),
        batch=nn.BatchNorm2d(3),
    )
    assert set(destinations(routes).values()) == {"other"}


def test_convolutions():
    routes = routes_of(
        plain=made(nn.Conv2d, 4, 8, 3, bias=False),
        depthwise=made(nn.Conv2d, 8, 8, 3, groups=8, bias=False),
        multiplied=made(nn.Conv1d, 8, 16, 3, groups=8, bias=False),
        grouped=made(nn.Conv2d, 8, 16, 3, groups=2, bias=False),
        one=made(nn.Conv1d, 1, 6, 5, bias=False),
    )
    assert destinations(routes) == {
        "plain.weight": "matrix",
        "depthwise.weight": "other",
        "multiplied.weight": "other",
        "grouped.weight": "matrix",
        "one.weight": "matrix",
    }
    views = {route.site.names[0]: route.view for route in routes.routes}
    assert views["plain.weight"] == matrices.FLATTENED
    assert views["grouped.weight"].shapes((16, 4, 3, 3)) == ((2, 8, 36),)


def test_the_fused_projection_of_attention_is_three_matrices():
    with torch.random.fork_rng():
        attention = nn.MultiheadAttention(6, 2)
        apart = nn.MultiheadAttention(6, 2, kdim=4, vdim=5)
    routes = {route.site.names[0]: route for route in routes_of(one=attention, two=apart).routes}
    assert routes["one.in_proj_weight"].view == optim.fused(6, 6, 6)
    assert [routes[f"two.{x}_proj_weight"].to for x in "qkv"] == ["matrix"] * 3
    assert routes["one.out_proj.weight"].to == "matrix"
    assert routes["one.in_proj_bias"].to == "other"


def test_frozen_parameters_are_listed_and_go_nowhere():
    layer, frozen = made(nn.Linear, 3, 4, bias=False), made(nn.Linear, 4, 3, bias=False)
    frozen.weight.requires_grad_(False)
    routes = routes_of(layer=layer, frozen=frozen)
    assert destinations(routes) == {"layer.weight": "matrix", "frozen.weight": "frozen"}
    assert "frozen: 1 parameters, 12 numbers" in str(routes)
    assert routes.labels() == ("matrix",)
    (group,) = routes.groups("matrix")
    assert [name for name, _ in group["params"]] == ["layer.weight"]


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(7, 4))
        self.stack = nn.Parameter(torch.ones(3, 5, 4))


def test_what_no_rule_covers_is_an_error_that_names_all_of_it():
    with pytest.raises(ValueError, match=r"no rule applies to p.table \(7, 4\), p.stack \(3, 5, 4\)"):
        routes_of(p=Positions(), layer=made(nn.Linear, 3, 4))


def test_a_reparametrized_weight_is_not_taken_for_a_matrix():
    layer = made(nn.Linear, 3, 4)
    nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(ValueError, match=r"no rule applies to layer\.parametrizations"):
        routes_of(layer=layer)


def test_rules_and_views_of_ones_own_come_first():
    tables = Rule("positions", "other", lambda site: site.names[0].endswith("table"))
    options = {"rules": [tables], "views": {"*.stack": matrices.STACKED, "head.weight": matrices.FLATTENED}}
    routes = routes_of(p=Positions(), head=made(nn.Linear, 4, 5, bias=False), options=options)
    assert destinations(routes) == {"p.table": "other", "p.stack": "matrix", "head.weight": "matrix"}
    assert {route.reason for route in routes.routes} == {"positions", "declared"}


def test_more_than_two_optimizers():
    rules = [Rule("mlp", "soft", lambda site: ".mlp." in site.names[0])]
    routes = split(small_gpt(), rules=rules, show=None)
    assert routes.labels() == ("other", "matrix", "soft")
    o = routes.optimizer(**optimizers(), soft=partial(optim.MOP, lr=0.1))
    assert [type(each) for each in o.optimizers.values()] == [optim.Muon, torch.optim.AdamW, optim.MOP]


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"the pattern '\*.qkv', needed one that matches"):
        split(small_gpt(), views={"*.qkv": matrices.FLATTENED}, show=None)


def test_a_view_that_does_not_fit_is_refused_by_name():
    with pytest.raises(ValueError, match=r"blocks.0.attention.qkv.weight has 24 rows .* needed 8 \+ 8 = 16"):
        split(small_gpt(), views={"*.qkv.weight": optim.fused(8, 8)}, show=None)


def test_the_table_is_shown():
    shown = []
    routes = split(small_gpt(), views={"*.qkv.weight": optim.fused(8, 8, 8, head=4)}, show=shown.append)
    assert shown == [str(routes)]
    (line,) = [line for line in shown[0].splitlines() if ".qkv" in line]
    assert line.split("  ")[-1].strip() == "declared"
    assert "2 of 4×8 + 2 of 4×8 + 2 of 4×8" in line


def test_groups_have_names_and_views():
    routes = split(small_gpt(), views={"*.qkv.weight": optim.fused(8, 8, 8)}, show=None)
    fused, plain = routes.groups("matrix")
    assert fused["view"] == optim.fused(8, 8, 8)
    assert plain["view"] == matrices.FLATTENED
    assert [name for name, _ in fused["params"]] == ["blocks.0.attention.qkv.weight"]
    (other,) = routes.groups("other")
    assert "view" not in other
    with pytest.raises(ValueError, match="nothing goes to 'muon', needed one of other, matrix"):
        routes.groups("muon")


def test_optimizers_are_needed_for_all_labels_and_no_others():
    routes = split(small_gpt(), show=None)
    with pytest.raises(ValueError, match=r"optimizers for \['matrix'\], needed for \['matrix', 'other'\]"):
        routes.optimizer(matrix=optimizers()["matrix"])
    with pytest.raises(ValueError, match="needed for"):
        routes.optimizer(**optimizers(), soap=optimizers()["matrix"])


# --- one step ---------------------------------------------------------------------------------------------------------


def trained(model, o, steps, first=0):
    for t in range(first, first + steps):
        tokens = torch.arange(t, t + 5)[None] % 256
        o.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        o.step()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_joint_step_is_the_steps_of_its_parts():
    together, apart = small_gpt(), small_gpt()
    o = split(together, show=None).optimizer(**optimizers())
    routes = split(apart, show=None)
    parts = [make(routes.groups(label)) for label, make in optimizers().items()]
    trained(together, o, 3)

    class All:
        def zero_grad(self):
            apart.zero_grad()

        def step(self):
            for part in parts:
                part.step()

    trained(apart, All(), 3)
    assert same(weights(together), weights(apart))


@pytest.mark.parametrize("name", ["embedding.weight", "blocks.0.mlp.up.weight", "norm.weight"])
def test_a_bad_gradient_of_any_part_leaves_every_part_alone(name):
    model, straight = small_gpt(), small_gpt()
    routes = split(model, show=None)
    o, other = routes.optimizer(**optimizers()), split(straight, show=None).optimizer(**optimizers())
    trained(model, o, 1)
    trained(straight, other, 1)
    before = weights(model)
    dict(model.named_parameters())[name].grad.view(-1)[0] = float("nan")
    o.step()
    assert o.report.nonfinite == (name,)
    assert same(weights(model), before)
    trained(model, o, 2, first=1)
    trained(straight, other, 2, first=1)
    assert same(weights(model), weights(straight))


def test_an_error_in_one_part_leaves_every_part_alone():
    model = small_gpt()

    def no_direction(C):
        raise ValueError("no direction")

    rules = [Rule("mlp", "broken", lambda site: ".mlp." in site.names[0])]
    routes = split(model, rules=rules, show=None)
    o = routes.optimizer(**optimizers(), broken=partial(optim.Muon, lr=0.1, direction=no_direction))
    before = weights(model)
    with pytest.raises(ValueError, match=r"blocks.0.mlp.*no direction"):
        trained(model, o, 1)
    assert same(weights(model), before)


class Faulty(torch.optim.SGD):
    """Descends, counts the step in its group, and then fails when told to."""

    failing = False

    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        if self.failing:
            raise RuntimeError("out of memory")


def whole(o):
    """Return the weights, the states and the settings of a joint optimizer, in memory of their own."""
    return copy.deepcopy(([p.detach() for group in o.param_groups for p in group["params"]], o.state_dict()))


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return repr(a) == repr(b)


def spoil_rate(o, lr):
    o.optimizers["adam"].param_groups[0]["lr"] = lr


def spoil_state(o):
    (state,) = o.optimizers["adam"].state.values()
    state["exp_avg"] = torch.zeros(7)


def spoil_step(o):
    o.optimizers["last"].failing = True


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (partial(spoil_rate, lr=torch.ones(2)), ValueError, r"adam: lr has shape \(2,\)"),
        (partial(spoil_rate, lr=float("nan")), ValueError, "adam: lr is nan, needed a finite number of at least 0"),
        (partial(spoil_rate, lr=-0.1), ValueError, "adam: lr is -0.1"),
        (spoil_state, RuntimeError, "size"),
        (spoil_step, RuntimeError, "out of memory"),
    ],
)
@pytest.mark.parametrize("foreach", [False, True])
def test_an_auxiliary_optimizer_that_raises_leaves_every_part_alone(spoil, error, message, foreach):
    """The last of three fails after it has moved, or the second before."""
    W, b, c = (nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (3,), (2,)))
    parts = {"matrix": optim.Muon([W], lr=0.1), "adam": torch.optim.AdamW([b], lr=0.1, foreach=foreach)}
    o = Joint({**parts, "last": Faulty([c], lr=0.1, momentum=0.9)})
    for p in (W, b, c):
        p.grad = torch.ones_like(p)
    o.step()
    spoil(o)
    before = whole(o)
    with pytest.raises(error, match=message):
        o.step()
    assert equal(whole(o), before)
    o.optimizers["last"].failing = False
    o.optimizers["adam"].param_groups[0]["lr"] = 0.1
    o.optimizers["adam"].state.clear()
    o.step()  # the control: what can be stepped moves
    assert o.param_groups[2]["count"] == 2
    assert not equal(whole(o)[0], before[0])


def test_an_optimizer_that_needs_a_closure_is_refused():
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="other is LBFGS, whose step needs a closure"):
        Joint({"other": torch.optim.LBFGS([p])})


def test_hooks_and_schedulers_of_a_part_work():
    W, b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    o = Joint({"matrix": optim.Muon([W], lr=0.1), "other": torch.optim.AdamW([b], lr=0.1)})
    seen = []
    for label, each in o.optimizers.items():
        each.register_step_pre_hook(lambda own, *_, label=label: seen.append((label, "before", W[0, 0].item())))
        each.register_step_post_hook(lambda own, *_, label=label: seen.append((label, "after", W[0, 0].item())))
    o.optimizers["matrix"].register_step_pre_hook(lambda *_: W.grad.nan_to_num_(1.0))
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda t: 0.5**t) for each in o.optimizers.values()]
    W.grad, b.grad = torch.eye(2), torch.ones(2)
    W.grad[0, 0] = float("nan")  # a hook mends it before anyone looks
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        o.step()
        for scheduler in schedulers:
            scheduler.step()
    assert [group["lr"] for group in o.param_groups] == [0.05, 0.05]
    after = W[0, 0].item()
    assert after != 1.0
    assert seen == [
        ("matrix", "before", 1.0),
        ("other", "before", 1.0),
        ("other", "after", 1.0),
        ("matrix", "after", after),
    ]


@pytest.mark.parametrize("bad", [complex("nan"), complex(0, float("inf"))])
def test_a_complex_parameter_of_another_optimizer_is_stepped_too(bad):
    W, z = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, dtype=torch.complex64))
    o = Joint({"matrix": optim.Muon([W], lr=0.1), "other": torch.optim.AdamW([("z", z)], lr=0.1)})
    W.grad, z.grad = torch.eye(2), torch.tensor([1j, 2.0])
    o.step()
    assert o.report.taken
    assert not torch.equal(z, torch.ones_like(z))
    z.grad[1] = bad
    o.step()
    assert o.report.nonfinite == ("z",)


def test_schedulers_reach_all_parts_and_the_closure_runs_once():
    model = small_gpt()
    o = split(model, show=None).optimizer(**optimizers())
    torch.optim.lr_scheduler.LambdaLR(o, lambda t: 0.5)
    assert [group["lr"] for group in o.param_groups] == [0.05, 0.005]
    assert o.optimizers["other"].param_groups[0]["lr"] == 0.005
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        return torch.ones(())

    assert o.step(closure) == 1.0
    assert calls == [True]


def test_a_resumed_joint_run_is_the_uninterrupted_one():
    straight, model = small_gpt(), small_gpt()
    trained(straight, split(straight, show=None).optimizer(**optimizers()), 4)
    o = split(model, show=None).optimizer(**optimizers())
    trained(model, o, 2)
    file = io.BytesIO()
    torch.save((model.state_dict(), o.state_dict()), file)
    file.seek(0)
    saved, state = torch.load(file, weights_only=True)
    resumed = small_gpt()
    resumed.load_state_dict(saved)
    again = split(resumed, show=None).optimizer(**optimizers())
    again.load_state_dict(state)
    trained(resumed, again, 2, first=2)
    assert same(weights(resumed), weights(straight))
    again.param_groups[0]["lr"] = 0.0  # the groups are still those of the parts
    assert again.optimizers["matrix"].param_groups[0]["lr"] == 0.0


def test_a_joint_state_of_which_one_part_does_not_fit_changes_no_part():
    """The first optimizer's state fits and the second's does not."""
    model = small_gpt()
    o = split(model, show=None).optimizer(**optimizers())
    trained(model, o, 2)
    saved = copy.deepcopy(o.state_dict())
    trained(model, o, 1, first=2)
    straight = copy.deepcopy((model, o))
    for label in saved:
        broken = copy.deepcopy(saved)
        broken[label]["param_groups"] = []
        with pytest.raises(ValueError, match="groups"):
            o.load_state_dict(broken)
        trained(model, o, 1, first=3)
        trained(*straight, 1, first=3)
        assert same(weights(model), weights(straight[0]))
    o.load_state_dict(saved)  # the control: what fits does change it
    trained(model, o, 1, first=4)
    trained(*straight, 1, first=4)
    assert not same(weights(model), weights(straight[0]))


def test_a_joint_optimizer_is_copied_whole():
    model = small_gpt()
    o = split(model, show=None).optimizer(**optimizers(direction=("quintic", 5)))
    trained(model, o, 1)
    twin, other = copy.deepcopy((model, o))
    trained(model, o, 2, first=1)
    trained(twin, other, 2, first=1)
    assert same(weights(model), weights(twin))


def test_what_a_joint_optimizer_refuses():
    W = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="2 parameters, needed each of them once"):
        Joint({"a": optim.Muon([W], lr=0.1), "b": torch.optim.AdamW([W])})
    with pytest.raises(ValueError, match="empty"):
        Joint({})
    o = Joint({"a": optim.Muon([W], lr=0.1)})
    with pytest.raises(ValueError, match="a group belongs to one of the optimizers a: add it there"):
        o.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    with pytest.raises(ValueError, match=r"the loaded state is of \['b'\], needed \['a'\]"):
        o.load_state_dict({"b": {}})
    o.optimizers["a"].add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    assert len(o.param_groups) == 2


def test_the_small_gpt_learns_with_exact_directions_too():
    model = small_gpt()
    o = split(model, show=None).optimizer(**optimizers(direction=polar.qdwh(), scale="match_rms_adamw", lr=0.02))
    tokens = torch.arange(5)[None]
    before = float(model.loss(tokens[:, :-1], tokens[:, 1:]).detach())
    for _ in range(10):
        trained(model, o, 1)
    assert float(model.loss(tokens[:, :-1], tokens[:, 1:]).detach()) < before - 0.5
