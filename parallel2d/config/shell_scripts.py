"""What ``-sc install=SHELL`` prints: functions that ask `completion` for the words to complete.

Hydra's own scripts take a command for a program whose first word is an override already, and know
``python FILE`` alone, not ``python -m MODULE`` or ``parallel2d train``.
"""

from __future__ import annotations

from parallel2d.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")

# {name}: of the function. {ask}: the command that answers.
_BASH = """\
{name}()
{{
    local program line
    program=${{COMP_WORDS[0]/#\\~/$HOME}}
    COMPREPLY=()
    while IFS= read -r line; do
        COMPREPLY+=("$line")
    done < <(
        COMP_LINE=$COMP_LINE COMP_POINT=$COMP_POINT COMP_WORD=${{COMP_WORDS[COMP_CWORD]}} \\
            {ask} -sc query=bash 2>/dev/null
    )
    # A space follows a word that is complete.
    if [[ ${{#COMPREPLY[@]}} -eq 1 && ${{COMPREPLY[0]}} != *[=./] ]]; then
        compopt +o nospace 2>/dev/null
    fi
    return 0
}}
"""
_BASH_COMMAND = """\
complete -o nospace -o default -F _parallel2d parallel2d
"""
# Other lines of Python are completed as they were before.
_BASH_PYTHON = """\
_parallel2d_any_python()
{
    COMPREPLY=()
    if [[ $COMP_LINE == *" -m parallel2d"* ]]; then
        _parallel2d_python "$@"
    elif [[ -n $_parallel2d_former ]]; then
        "$_parallel2d_former" "$@"
    fi
}
if [[ $(complete -p python 2>/dev/null) != *_parallel2d_any_python* ]]; then
    _parallel2d_former=$(complete -p python 2>/dev/null | sed -n 's/.* -F \\([^ ]*\\) .*/\\1/p')
fi
complete -o nospace -o default -F _parallel2d_any_python python python3
"""
_ZSH = """\
{name}() {{
    local program=${{words[1]/#\\~/$HOME}}
    local -a found whole
    found=("${{(@f)$(
        COMP_LINE="${{(j: :)words[1,CURRENT-1]}} $PREFIX" {ask} -sc query=zsh 2>/dev/null
    )}}")
    found=(${{found:#}})
    if (( ! ${{#found}} )); then
        compset -P '*='
        _files
        return
    fi
    # A space follows a word that is complete.
    whole=(${{found:#*[=./]}})
    found=(${{(M)found:#*[=./]}})
    compadd -Q -- $whole
    compadd -Q -S '' -- $found
}}
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}
"""
_ZSH_COMMAND = """\
compdef _parallel2d parallel2d
"""
_ZSH_PYTHON = """\
_parallel2d_any_python() {
    if [[ " ${words[*]}" == *" -m parallel2d"* ]]; then
        _parallel2d_python "$@"
    elif [[ -n $_parallel2d_former ]]; then
        $_parallel2d_former "$@"
    else
        _files
    fi
}
if [[ $_comps[python] != _parallel2d_any_python ]]; then
    _parallel2d_former=$_comps[python]
fi
compdef _parallel2d_any_python python python3
"""
_FISH = """\
function {name}
    set -lx COMP_LINE (commandline -cp)
    set -l program (commandline -opc)[1]
    {ask} -sc query=fish 2>/dev/null
end
"""
_FISH_COMMAND = """\
complete -c parallel2d -f -a '(_parallel2d)'
"""
_FISH_PYTHON = """\
for program in python python3
    complete -c $program -n 'string match -q -- "* -m parallel2d*" (commandline -cp)' \\
        -f -a '(_parallel2d_python)'
end
"""
_FUNCTIONS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_OF_COMMAND = {"bash": _BASH_COMMAND, "zsh": _ZSH_COMMAND, "fish": _FISH_COMMAND}
_OF_PYTHON = {"bash": _BASH_PYTHON, "zsh": _ZSH_PYTHON, "fish": _FISH_PYTHON}
_REMOVAL = {
    "bash": "complete -r {names}",
    "zsh": "compdef -d {names}",
    "fish": "for program in {names}; complete -e -c $program; end",
}


def shell_script(request: str, program: str) -> str:
    """What a shell must run for ``install=SHELL`` or ``uninstall=SHELL``.

    ``program``: how the command was called: lines of Python are completed for a program that
    begins with ``python``, otherwise those of ``parallel2d``. Raises `ConfigError` for any other
    request.
    """
    action, _, shell = request.partition("=")
    if action not in ("install", "uninstall") or shell not in SHELLS:
        allowed = " or ".join(f"{each}=SHELL" for each in ("install", "uninstall"))
        raise ConfigError(f"-sc {request}: it takes {allowed}, with {', '.join(SHELLS)}")
    by_python = program.startswith("python")
    if action == "uninstall":
        return _REMOVAL[shell].format(names="python python3" if by_python else "parallel2d")
    if by_python:
        ask = "$program -m parallel2d" if shell == "fish" else '"$program" -m parallel2d'
        return _FUNCTIONS[shell].format(name="_parallel2d_python", ask=ask) + _OF_PYTHON[shell]
    ask = "$program" if shell == "fish" else '"$program"'
    return _FUNCTIONS[shell].format(name="_parallel2d", ask=ask) + _OF_COMMAND[shell]
