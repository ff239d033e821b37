# shellcheck shell=sh
# Runs in the workspace. $1: folder of outputs, $2: file with the mean time. Standard input: names of files of that
# folder, each with its name in the workspace. Prints size and name, then hash and name of every output, and the time.
cd -- "$1" || exit 1
set -- "$2" output_*_*.raw
speed=$1; shift
if [ -f "$1" ]; then
    stat -c 'size %s %n' -- "$@"
    sha256sum -- "$@"
fi
cd .. || exit 1
while read -r from to; do
    if [ -f "$from" ]; then mv -f -- "$from" "$to"; fi
done
if [ -f "$speed" ]; then echo "speed $(head -c 64 -- "$speed")"; fi
