# shellcheck shell=sh disable=SC2086
# $1: the folder of objects. Standard input, for each file of the current folder: its size and its name, which is only
# measured then, or - and its name. Prints the names that are in `objects` now.
objects=$1 names=
good=$({
    while read -r size name; do
        if [ "$size" = - ]; then names="$names $name"
        elif [ "$(stat -c %s -- "$name")" = "$size" ]; then echo "$name $name"; fi
    done
    if [ -n "$names" ]; then sha256sum -- $names; fi
} | while read -r hash name; do if [ "$hash" = "$name" ]; then echo "$name"; fi; done)
set -- $good
if [ $# -gt 0 ]; then mv -f -- "$@" "$objects/" && echo "$good"; fi
