#!/bin/sh
# Stub of ExecuTorch's own runners, with their flags, logs and exit codes: the first word of a model names the
# behaviour.
echo "called $0 $*" >&2
echo "environment LD_LIBRARY_PATH=$LD_LIBRARY_PATH ADSP_LIBRARY_PATH=$ADSP_LIBRARY_PATH" >&2
for word in "$@"; do
    case $word in
        --input_list_path=*) list=${word#*=} ;;
        --output_folder_path=*) outputs=${word#*=} ;;
        --etdump_path=*) echo dump >"${word#*=}" ;;
        --heap_profiling_path=*) echo "DSP:before_context_created (bytes), 928212" >"${word#*=}" ;;
        --no_such_flag=*) echo "ERROR: unknown command line flag 'no_such_flag'" >&2; exit 1 ;;
    esac
done
read -r what _ <model.pte
abort() { echo "F 00:00:00.1 executorch:main.cpp:9] In function main(), assert failed (status): $1" >&2; kill -ABRT $$; }
case $what in
    crash) kill -SEGV $$ ;;
    hang) echo $$ >hangs; exec sleep 600 ;;
    unloadable) abort "Loading of method forward failed with status 0x20" ;;
    no-dsp) abort "qnn_executorch_open failed: 0x4e" ;;
    refused-on-dsp) abort "qnn_executorch_execute_all failed: 0xffffffff" ;;
    assertion) abort "something else" ;;
    nothing) exit 0 ;;
    loader) echo "CANNOT LINK EXECUTABLE: library libc++.so.1 not found" >&2; exit 1 ;;
esac
line=0
while read -r name _; do
    cp "$name" "$outputs/output_${line}_0.raw"
    case $what in
        unsteady) if [ "$line" -eq 1 ]; then printf 'x2345678' >"$outputs/output_1_0.raw"; fi ;;
        short) printf '1' >"$outputs/output_${line}_0.raw" ;;
    esac
    line=$((line + 1))
    case $what in
        direct | silent) ;;
        *) echo "I 00:00:00.2 executorch:main.cpp:1] 1 inference took $line.500000 ms, avg $line.500000 ms" >&2 ;;
    esac
done <"$list"
case $what in
    direct) echo "I 0] Method execution took a total of $((line * 2)).000000 ms, performing $line inference, avg 2.0 ms." >&2 ;;
    silent) printf '1.25' >inference_speed.txt ;;
    *) echo "I 0] Total $line inference took 99.000000 ms, avg 9.000000 ms" >&2 ;;
esac
