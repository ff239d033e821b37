#!/bin/sh
# Runs on the device: executes the program of this folder and writes its exit code beside it.
cd "$(dirname "$0")" || exit
here=$(pwd)
mkdir -p @outputs@
chmod 755 ./*
LD_LIBRARY_PATH=$here ADSP_LIBRARY_PATH=$here
export LD_LIBRARY_PATH ADSP_LIBRARY_PATH
# In direct mode the DSP opens the outputs; it has no current folder.
./@runner@ @flags@ --output_folder_path="$here/@outputs@" &
echo $! >pid
wait $!
echo $? >exit_code
