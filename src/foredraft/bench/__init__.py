"""What `foredraft bench` measures and writes: suites, interleaved runs, cells, report and plots."""
