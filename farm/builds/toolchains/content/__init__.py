"""What a toolchain is by content, and where its code comes from."""
