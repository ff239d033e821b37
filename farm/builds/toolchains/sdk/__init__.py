"""SDKs that farm fetches: from Qualcomm by ExecuTorch's downloader, from wheels by pip; checked before use."""
