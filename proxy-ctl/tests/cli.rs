//! The binary as its users call it: help, and bad input that must end it before anything is touched.
#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use rstest::rstest;
use tempfile::TempDir;

fn proxy_ctl(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_proxy-ctl"))
        .args(args)
        .env_remove("KUBERNETES_SERVICE_HOST")
        .env_remove("KUBERNETES_SERVICE_PORT")
        .env_remove("KUBECONFIG")
        .output()
        .unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A folder with a configuration in it.
fn config(body: &str) -> TempDir {
    let folder = TempDir::new().unwrap();
    let head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration";
    fs::write(folder.path().join("config.yaml"), format!("{head}\n{body}\n")).unwrap();
    folder
}

/// With the configuration of `folder`; the pins would lie there too.
fn run(folder: &Path, more: &[&str]) -> Output {
    let config = folder.join("config.yaml");
    let pins = folder.join("bpf");
    let mut args = vec!["run", "--config", config.to_str().unwrap(), "--bpffs", pins.to_str().unwrap()];
    args.extend(more);
    proxy_ctl(&args)
}

/// Exit code 1, `message` on stderr, and nothing was made.
fn refused(folder: &Path, output: &Output, message: &str) {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains(message), "{message:?} is not in {text:?}");
    assert!(!folder.join("bpf").exists(), "the pin folder was made");
}

#[rstest]
#[case::wrong_value(
    "conntrack: {maxPerCore: -1}",
    "config.yaml: conntrack.maxPerCore must be 0 or more, found -1"
)]
#[case::unknown_mode(
    "mode: fast",
    "mode must be ebpf, nftables, iptables, ipvs or userspace, found \"fast\""
)]
#[case::not_built("ebpf: {algorithm: maglev}", "ebpf.algorithm must be random, found \"maglev\"")]
#[case::mode_not_built("mode: ipvs", "mode ipvs is not built yet: use ebpf")]
#[case::no_cgroup(
    "ebpf: {cgroup: /nonexistent}",
    "ebpf.cgroup must be a folder of cgroup v2, found /nonexistent"
)]
#[case::other_filesystem("ebpf: {cgroup: /proc}", "ebpf.cgroup must be a folder of cgroup v2, found /proc")]
#[case::two_documents("---\nmode: ebpf", "config.yaml: must be one document, found a second at line 4")]
#[case::no_yaml("mode: [", "config.yaml: is neither YAML nor JSON")]
#[case::kubeconfig(
    "clientConnection: {kubeconfig: /nonexistent/kubeconfig}",
    "kubeconfig /nonexistent/kubeconfig: cannot be read"
)]
fn a_wrong_configuration_names_the_field(#[case] body: &str, #[case] message: &str) {
    let folder = config(body);
    refused(folder.path(), &run(folder.path(), &[]), message);
}

#[rstest]
#[case::mode(&["--proxy-mode", "fast"], "--proxy-mode")]
#[case::verbosity(&["-v", "11"], "0..=10")]
#[case::hostname(&["--hostname-override", " "], "--hostname-override must be the name of a Node")]
#[case::manifests(&["--manifests", "/nonexistent/manifests"], "--manifests /nonexistent/manifests must be a folder")]
fn a_wrong_flag_names_itself(#[case] flags: &[&str], #[case] message: &str) {
    let folder = config("mode: ebpf");
    refused(folder.path(), &run(folder.path(), flags), message);
}

#[rstest]
fn without_a_source_the_ways_are_named(
    #[values("--kubeconfig FILE", "--manifests DIR", "in a pod")] way: &str,
) {
    let folder = config("mode: ebpf");
    refused(folder.path(), &run(folder.path(), &[]), way);
}

#[test]
fn a_missing_file_is_named() {
    let folder = TempDir::new().unwrap();
    let output = run(folder.path(), &[]);
    refused(folder.path(), &output, "config.yaml: cannot be read: No such file");
    assert_eq!(stderr(&output).matches("No such file").count(), 1, "{}", stderr(&output));
}

#[rstest]
#[case(&["run", "--colour"])]
#[case(&["fly"])]
#[case(&[])]
#[case(&["run", "--manifests", "/m", "--kubeconfig", "/k"])]
fn a_command_line_that_is_not_understood_is_an_error(#[case] args: &[&str]) {
    let output = proxy_ctl(args);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stdout(&output).is_empty());
}

#[rstest]
#[case(&["--help"], "proxy-ctl run --config")]
#[case(&["run", "--help"], "proxy-ctl run --manifests")]
#[case(&["status", "--help"], "JSON:")]
#[case(&["services", "--help"], "proxy-ctl services kube-system/kube-dns:dns")]
#[case(&["backends", "--help"], "JSON:")]
#[case(&["cleanup", "--help"], "proxy-ctl cleanup")]
fn help_has_an_example(#[case] args: &[&str], #[case] example: &str) {
    let output = proxy_ctl(args);
    assert_eq!(output.status.code(), Some(0));
    assert!(stdout(&output).contains(example), "{}", stdout(&output));
}

#[test]
fn the_version_tells_how_the_object_was_built() {
    let output = proxy_ctl(&["--version"]);
    assert_eq!(output.status.code(), Some(0));
    let text = stdout(&output);
    assert!(text.starts_with(concat!("proxy-ctl ", env!("CARGO_PKG_VERSION"))), "{text}");
    assert!(text.contains("BPF object: "), "{text}");
}

#[rstest]
fn an_empty_state_says_what_to_do_next(#[values("table", "json")] format: &str) {
    let folder = TempDir::new().unwrap();
    let pins = folder.path().join("bpf");
    for command in ["status", "services", "backends", "cleanup"] {
        let output = proxy_ctl(&[command, "--bpffs", pins.to_str().unwrap(), "--output", format]);
        assert_eq!(output.status.code(), Some(0), "{command}: {}", stderr(&output));
        if format == "json" {
            serde_json::from_str::<serde_json::Value>(&stdout(&output)).unwrap();
        } else {
            assert!(stdout(&output).contains("proxy-ctl"), "{command}: {}", stdout(&output));
        }
    }
    assert!(!pins.exists());
}
