"""native_runner/ and Python packages built for other machines, and what their ELF files say."""
