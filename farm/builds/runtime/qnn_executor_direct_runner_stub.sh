#!/bin/sh
# Stub of qnn_executor_direct_runner on a virtual device, which has no DSP. It takes the same flags, computes with the
# farm_runner beside it, and prints and writes the same as the original. It has no DSP, FastRPC or process domain: tests
# with it cover only farm's call and farm's reading of the results.
# Source: ExecuTorch 1.5, examples/qualcomm/direct_executor_runner.
here=$(dirname -- "$0")
model=model.pte list=input_list.txt outputs=. etdump=etdump.etdp method=0 domain=3
for word in "$@"; do
    value=${word#*=}
    case $word in
        --model_path=*) model=$value ;;
        --input_list_path=*) list=$value ;;
        --output_folder_path=*) outputs=$value ;;
        --etdump_path=*) etdump=$value ;;
        --method_index=*) method=$value ;;
        --domain_id=*) domain=$value ;;
        *)
            echo "ERROR: unknown command line flag '${word%%=*}'" >&2
            exit 1
            ;;
    esac
done
give_up() {
    echo "F 00:00:00.000000 executorch:stub.cpp:1] In function main(), assert failed: $1" >&2
    kill -ABRT $$
}
case $domain in
    0 | 3) echo "I 00:00:00.000000 executorch:stub.cpp:2] STUB of direct mode, domain $domain" >&2 ;;
    *) give_up "Unable to find domain $domain" ;;
esac
# Without an input list the original executes nothing and exits with 0.
if [ ! -e "$list" ]; then exit 0; fi
"$here/farm_runner" --model_path="$model" --input_list_path="$list" --output_folder_path="$outputs" \
    --method_index="$method" --etdump_path="$etdump" --performance_output_path=stub_speed.txt --result_path= &
runner=$!
trap 'kill -9 "$runner"' TERM
wait "$runner"
code=$?
case $code in
    0) ;;
    [1-9] | 1[0-9]) give_up "qnn_executorch_execute_all failed: 0xffffffff" ;;
    # A signal stands for a crash of the DSP's process.
    *) exit "$code" ;;
esac
count=$(wc -l <"$list")
total=$(awk -v "mean=$(cat stub_speed.txt)" -v "count=$count" 'BEGIN { printf "%.6f", mean * count }')
echo "I 00:00:00.000000 executorch:stub.cpp:3] Method execution took a total of $total ms, performing" \
    "$((count)) inference, avg $(cat stub_speed.txt) ms." >&2
