"""Settings that cannot be: an error that names the setting, so that a command can name its flag."""


class SettingError(ValueError):
    """A setting that makes no sense; one line says what was given, what was expected and how to mend it.

    The library knows no flags. Whoever offers settings as flags, form fields or columns of a sheet puts their own name
    in the place of `setting`.

    Attributes:
        setting: name of the parameter, as in Python.
        given: its value; None where the value has nothing to do with it, such as a flag that is missing.
        problem: what is wrong and how to mend it.

    Example:
        >>> from sdc.settings import SettingError
        >>> str(SettingError("steps", 0, "expected at least 1"))
        'steps=0: expected at least 1'
    """

    def __init__(self, setting: str, given: object, problem: str) -> None:
        self.setting, self.given, self.problem = setting, given, problem
        super().__init__(f"{setting}={given}: {problem}" if given is not None else f"{setting}: {problem}")
