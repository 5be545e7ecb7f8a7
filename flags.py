"""The command line: a frozen dataclass of knobs becomes the flags, the manual and the checks of a script.

    @dataclass(frozen=True)
    class Config:
        steps: int = knob(200, "policy updates", low=1, group="The run")
        kl: float = knob(0.0, "weight of the KL penalty", low=0)       # stays in the group above it

    config, given = parse(Config, __doc__)          # --steps and --kl exist, --help explains them

A bad value ends the program with one line and exit code 2. `given` names the flags that were typed, so that a
preset or a resumed run can tell a wish from a default.
"""
import argparse
import sys
from dataclasses import field, fields


def knob(default, help: str, low=None, above=None, high=None, choices: tuple = (), group: str = ""):
    """A dataclass field that is a flag: low <= value <= high, value > above, value in choices."""
    return field(default=default, metadata={"help": help, "low": low, "above": above, "high": high, "choices": choices,
                                            "group": group})


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        fail(f"{message} (--help explains every flag)")


def fail(message: str):
    """One line for a person, exit code 2 for a program."""
    print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)


def check(value, kind: type, limits: dict):
    """-> what is wrong with a value, or None."""
    low, above, high, choices = (limits[key] for key in ("low", "above", "high", "choices"))
    if type(value) is not kind and not (kind is float and type(value) is int):
        return f"{value!r} is not a {kind.__name__}"
    if kind is tuple and not all(type(part) is str for part in value):
        return f"{value!r} is not a list of names"
    if kind is float and not abs(value) < 1e300:            # nor a whole number that no float can hold
        return f"{value} is not a finite number"
    if choices and value not in choices:
        return f"{value!r} is not one of {', '.join(choices)}"
    if low is not None and value < low:
        return f"{value} is too small, expected at least {low}"
    if above is not None and value <= above:
        return f"{value} is too small, expected more than {above}"
    if high is not None and value > high:
        return f"{value} is too large, expected at most {high}"


def convert(kind: type, limits: dict):
    """-> a function from a flag's text to its checked value."""
    def from_text(text: str):
        try:
            value = tuple(part for part in text.split(",") if part) if kind is tuple else kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {'a whole number' if kind is int else 'a number'}")
        if wrong := check(value, kind, limits):
            raise argparse.ArgumentTypeError(wrong)
        return value
    return from_text


def from_saved(config_class: type, saved: dict, where: str):
    """A config from its JSON, held to the same limits as the flags."""
    known = {knob_field.name: knob_field for knob_field in fields(config_class)}
    if odd := sorted(saved.keys() ^ known.keys()):
        raise ValueError(f"{where} was not written by this version of train.py: see {', '.join(odd)}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    for name, value in values.items():
        if wrong := check(value, type(known[name].default), known[name].metadata):
            raise ValueError(f"{where}: {name}: {wrong}")
    return config_class(**values)


def parse(config_class: type, description: str, argv: list[str] | None = None, positional: str = ""):
    """-> (config, the set of fields that were given); the field named `positional` takes no dashes."""
    parser = Parser(description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser
    for knob_field in fields(config_class):
        meta, kind = knob_field.metadata, type(knob_field.default)
        if meta["group"]:
            group = parser.add_argument_group(meta["group"])
        flag, options = "--" + knob_field.name.replace("_", "-"), {"default": argparse.SUPPRESS}
        if positional == knob_field.name:
            flag, options = knob_field.name, {}
        elif kind is not bool:
            options["metavar"] = {int: "N", float: "X"}.get(kind, "A,B" if kind is tuple else "NAME")
        shown = ",".join(knob_field.default) if kind is tuple else knob_field.default
        help_text = meta["help"] + ("" if kind is bool or shown == "" else f" (default {shown})")
        if kind is bool:
            options["action"] = "store_true"
        else:
            options["type"] = convert(kind, meta)
            if meta["choices"]:
                options["metavar"] = "|".join(meta["choices"])
        group.add_argument(flag, help=help_text.replace("%", "%%"), **options)
    given = vars(parser.parse_args(argv))
    return config_class(**given), set(given)
