"""`sdc fleet`: exit codes, pages, CSV files, and malicious host names."""


def test_the_benchmark_measures_what_it_says() -> None:
    from sdc.tools.bench._burnin import summarize_results

    found = summarize_results(20)
    assert found["reports"] == 20
    assert 0 < found["seconds"] < 60
    assert 20 < found["megabytes"] < 2000
