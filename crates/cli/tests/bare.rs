//! The bare binary: verbs that need no Python work, the others say what they need.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use assert_cmd::Command;
use serde_json::Value;

fn kvbaton(arguments: &[&str]) -> (i32, String, String) {
    let output = Command::cargo_bin("kvbaton").unwrap().args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn error_kind(stdout: &str) -> String {
    let document: Value = serde_json::from_str(stdout).unwrap();
    assert!(document["error"]["message"].as_str().is_some_and(|m| !m.contains('\n')), "{stdout}");
    assert!(document["error"]["fields"].is_object());
    document["error"]["kind"].as_str().unwrap().to_owned()
}

const PLAIN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../mil/testdata/two_functions.mlpackage");

#[test]
fn help_and_version_go_to_stdout_with_code_0() {
    for flag in ["--help", "--version"] {
        let (code, stdout, stderr) = kvbaton(&[flag]);
        assert_eq!((code, stderr.as_str()), (0, ""));
        assert!(stdout.contains("kvbaton"));
    }
}

#[test]
fn wrong_usage_has_code_2_and_names_the_argument() {
    let (code, stdout, stderr) = kvbaton(&["inspect"]);
    assert_eq!((code, stdout.as_str()), (2, ""));
    assert!(stderr.contains("<FILE>"), "{stderr}");
    let (code, stdout, _) = kvbaton(&["bench", "handoff", "--threads", "many", "--json"]);
    assert_eq!((code, error_kind(&stdout).as_str()), (2, "usage"));
}

#[test]
fn verbs_that_need_python_say_how_to_get_it() {
    let (code, stdout, stderr) = kvbaton(&["export", "model", "out.mlpackage"]);
    assert_eq!((code, stdout.as_str()), (2, ""));
    assert!(stderr.starts_with("error: `kvbaton export` needs the Python package"), "{stderr}");
    assert!(stderr.contains("\nhint: pip install"), "{stderr}");
    let (code, stdout, _) =
        kvbaton(&["run", "--prefill", "p", "--decode", "m", "--prompt", "hello", "--json"]);
    assert_eq!((code, error_kind(&stdout).as_str()), (2, "unavailable"));
}

#[test]
fn a_folder_that_is_no_package_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let (code, stdout, stderr) = kvbaton(&["inspect", path]);
    assert_eq!((code, stdout.as_str()), (2, ""));
    assert!(stderr.contains(path), "{stderr}");
    let (code, stdout, _) = kvbaton(&["inspect", path, "--json"]);
    assert_eq!((code, error_kind(&stdout).as_str()), (2, "package"));
}

#[test]
fn inspect_prints_functions_and_operations() {
    let (code, stdout, stderr) = kvbaton(&["inspect", PLAIN]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert!(stdout.contains("function ") && stdout.contains("operations: "), "{stdout}");
    let (code, stdout, _) = kvbaton(&["inspect", PLAIN, "--json"]);
    let document: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, &document["kind"]), (0, &Value::from("mlpackage")));
    assert_eq!(document["functions"].as_array().unwrap().len(), 2);
}

#[test]
fn layouts_are_listed_shown_and_planned() {
    let (code, stdout, _) = kvbaton(&["layouts"]);
    assert_eq!(code, 0);
    assert!(stdout.contains("mlx-lm"), "{stdout}");
    let (code, shown, _) = kvbaton(&["layouts", "show", "mlx-lm"]);
    assert_eq!(code, 0);
    assert!(shown.contains("name = \"mlx-lm\""), "{shown}");
    let plan = ["layouts", "plan", "kvbaton-stacked", "mlx-lm", "--live", "300", "--json"];
    let (code, stdout, _) = kvbaton(&plan);
    let document: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(code, 0);
    assert_eq!(document["bytes"], 2 * 28 * 8 * 300 * 128 * 2);
    assert!(document["operations"].as_u64().unwrap() <= 2 * 28 * 8);
    let (code, _, stderr) = kvbaton(&["layouts", "show", "yeti"]);
    assert_eq!(code, 2);
    assert!(stderr.contains("no layout is called `yeti`") && stderr.contains("hint: known: "), "{stderr}");
}

#[test]
fn bench_handoff_checks_and_reports_in_the_documented_names() {
    let arguments =
        ["bench", "handoff", "--shape", "smollm2-135m", "--context", "64,128", "--repeats", "2", "--json"];
    let (code, stdout, _) = kvbaton(&arguments);
    assert_eq!(code, 0);
    let document: Value = serde_json::from_str(&stdout).unwrap();
    assert!(document["machine"]["cores"].is_number());
    for state in ["warm", "cold"] {
        assert!(document["memcpy"][state]["gigabytes_per_second"].is_number());
    }
    let rows = document["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for (row, context) in rows.iter().zip([64, 128]) {
        assert_eq!(row["context"], context);
        assert_eq!(row["live_rows"], context * 3 / 4);
        assert_eq!(row["bytes"], 2 * 30 * 3 * (context * 3 / 4) * 64 * 2);
        for name in ["seconds", "copy_seconds", "plan_seconds"] {
            assert!(row[name]["min"].as_f64() <= row[name]["median"].as_f64(), "{name}");
        }
        assert!(row["memcpy_ratio"].is_number());
    }
}

#[test]
fn bench_handoff_takes_sources_of_every_placement() {
    for source in
        ["llama-cpp", "llama-cpp-v-transposed", "vllm-nhd", "mlx-lm-batch", "coreml-llm-rolling", "forge"]
    {
        let shape = ["--shape", "smollm2-135m", "--context", "64", "--repeats", "1", "--json"];
        let (code, stdout, _) = kvbaton(&[&["bench", "handoff", "--source", source], &shape[..]].concat());
        assert_eq!(code, 0, "{source}: {stdout}");
        let document: Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!(document["rows"][0]["bytes"], 2 * 30 * 3 * 48 * 64 * 2, "{source}");
    }
}

#[test]
fn a_row_stride_below_a_row_is_refused() {
    let (code, _, stderr) =
        kvbaton(&["bench", "handoff", "--shape", "smollm2-135m", "--context", "64", "--row-stride", "100"]);
    assert_eq!(code, 2);
    assert!(stderr.contains("100 bytes") && stderr.contains("128 bytes"), "{stderr}");
}

#[test]
fn plans_for_shipped_machines_need_no_python() {
    let arguments = ["plan", "--model", "qwen3-4b", "--machine", "m5-pro", "--context", "4096"];
    let (code, stdout, _) = kvbaton(&arguments);
    assert_eq!(code, 0);
    assert!(stdout.contains("do not hand over") && stdout.contains("  <--"), "{stdout}");
    assert!(stdout.contains("never measured by kvbaton"), "{stdout}");
    let (code, stdout, _) = kvbaton(&[&arguments[..], &["--json"]].concat());
    let document: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, document["pick"].as_str()), (0, Some("mlx")));
    assert!(document["break_even_tokens"].is_null());
    let (code, stdout, _) = kvbaton(&[&arguments[..], &["--objective", "energy", "--json"]].concat());
    assert_eq!((code, error_kind(&stdout).as_str()), (2, "usage"));
}

#[cfg(not(target_os = "macos"))]
#[test]
fn coreml_needs_a_mac_and_its_flags_need_coreml() {
    let (code, _, stderr) = kvbaton(&["bench", "prefill", PLAIN, "--engine", "coreml"]);
    assert_eq!(code, 2);
    assert!(stderr.starts_with("error: the engine coreml needs a Mac, this is "), "{stderr}");
    assert!(stderr.contains("\nhint: leave --engine out"), "{stderr}");
    let (code, stdout, _) = kvbaton(&["bench", "prefill", PLAIN, "--compute-units", "cpu-and-ne", "--json"]);
    assert_eq!((code, error_kind(&stdout).as_str()), (2, "usage"));
    let (code, stdout, _) = kvbaton(&["bench", "prefill", PLAIN, "--engine-timeout", "60", "--json"]);
    assert_eq!((code, error_kind(&stdout).as_str()), (2, "usage"));
    let (code, stdout, _) = kvbaton(&["bench", "prefill", "m.mlmodelc", "--json"]);
    assert_eq!((code, error_kind(&stdout).as_str()), (2, "unavailable"));
}

#[test]
fn unknown_engines_and_units_are_refused() {
    for arguments in [["--engine", "gpu"], ["--compute-units", "ane"]] {
        let (code, stdout, _) = kvbaton(&["bench", "prefill", PLAIN, arguments[0], arguments[1], "--json"]);
        assert_eq!((code, error_kind(&stdout).as_str()), (2, "usage"));
    }
}

/// Nobody may take a document that is not all there for the answer.
#[cfg(target_os = "linux")]
#[test]
fn output_that_is_lost_is_our_failure() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let done = std::process::Command::new(assert_cmd::cargo::cargo_bin!("kvbaton"))
        .arg("layouts")
        .stdout(full)
        .output()
        .unwrap();
    assert_eq!(done.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&done.stderr).starts_with("error: cannot write to stdout"));
}
