# shellcheck shell=sh
# In the folder. Standard input: names of files. Prints what a link leads to, the SHA-256 of another file, and the name.
set --
while read -r name; do
    if [ -L "$name" ]; then echo "$(readlink -- "$name") $name"; elif [ -f "$name" ]; then set -- "$@" "$name"; fi
done
if [ $# -gt 0 ]; then sha256sum -- "$@"; fi
true
