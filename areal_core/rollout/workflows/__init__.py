"""The workflows that come with the kernel."""
