//! Tests of the binary as its users call it: help, and bad input that must end it before anything
//! is touched.
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

/// Returns what the binary has printed, and asserts that it has succeeded.
fn printed(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
    stdout(output)
}

/// Makes a folder with a configuration file in it.
fn config(body: &str) -> TempDir {
    let folder = TempDir::new().unwrap();
    let head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration";
    fs::write(folder.path().join("config.yaml"), format!("{head}\n{body}\n")).unwrap();
    folder
}

/// Runs a command with the configuration of `folder`.
fn configured(command: &str, folder: &Path, more: &[&str]) -> Output {
    let config = folder.join("config.yaml");
    proxy_ctl(&[&[command, "--config", config.to_str().unwrap()], more].concat())
}

/// Runs the proxy with a configuration. Its pins would be in `folder` too.
fn run(folder: &Path, more: &[&str]) -> Output {
    let pins = folder.join("bpf");
    configured("run", folder, &[&["--bpffs", pins.to_str().unwrap()], more].concat())
}

/// Asserts exit code 1, `message` on stderr, and that nothing was made.
fn refused(folder: &Path, output: &Output, message: &str) {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains(message), "{message:?} is not in {text:?}");
    assert!(!folder.join("bpf").exists(), "the pin folder was made");
}

#[rstest]
#[case::wrong_value(
    "conntrack: {maxPerCore: -1}",
    "config.yaml: conntrack.maxPerCore must be from 0 to 2147483647, found -1"
)]
#[case::unknown_mode(
    "mode: fast",
    "mode must be ebpf, nftables, iptables, ipvs or userspace, found \"fast\""
)]
#[case::no_cgroup(
    "mode: ebpf\nebpf: {cgroup: /nonexistent, modeFallback: false}",
    "ebpf.cgroup must be a folder of cgroup v2, found /nonexistent"
)]
#[case::other_filesystem(
    "mode: ebpf\nebpf: {cgroup: /proc, modeFallback: false}",
    "ebpf.cgroup must be a folder of cgroup v2, found /proc"
)]
#[case::unknown_scheduler(
    "mode: ipvs\nipvs: {scheduler: nosuch}",
    "ipvs.scheduler must be rr, wrr, lc, wlc, lblc, lblcr, dh, sh, sed, nq, fo, ovf, mh or twos, found \"nosuch\""
)]
#[case::two_documents("---\nmode: ebpf", "config.yaml: must be one document, found a second at line 4")]
#[case::no_yaml("mode: [", "config.yaml: is neither YAML nor JSON")]
#[case::kubeconfig(
    "clientConnection: {kubeconfig: /nonexistent/kubeconfig}",
    "kubeconfig /nonexistent/kubeconfig: cannot be read"
)]
fn error_names_the_invalid_field(#[case] body: &str, #[case] message: &str) {
    let folder = config(body);
    refused(folder.path(), &run(folder.path(), &[]), message);
}

#[rstest]
#[case::unknown(&["--fast"], "--fast is not a known flag")]
#[case::verbosity(&["-v", "-1"], "--v must be a whole number of 0 or more, found \"-1\"")]
#[case::removed(&["--cleanup-iptables"], "--cleanup-iptables is gone: use --cleanup")]
#[case::hostname(&["--hostname-override", " "], "--hostname-override (hostnameOverride) must be the name of a Node")]
#[case::manifests(&["--manifests", "/nonexistent/manifests"], "--manifests /nonexistent/manifests must be a folder")]
#[case::unwritable(&["--write-config-to=/nonexistent/c.yaml"], "--write-config-to /nonexistent/c.yaml: the file cannot be written")]
fn error_names_the_invalid_flag(#[case] flags: &[&str], #[case] message: &str) {
    let folder = config("mode: ebpf");
    refused(folder.path(), &run(folder.path(), flags), message);
}

#[rstest]
fn without_a_source_the_error_lists_the_possible_sources(
    #[values("--kubeconfig FILE", "--manifests DIR", "in a pod")] way: &str,
) {
    let folder = config("mode: ebpf");
    refused(folder.path(), &run(folder.path(), &[]), way);
}

#[test]
fn error_names_the_missing_file() {
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
fn invalid_command_lines(#[case] args: &[&str]) {
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
#[case(&["flows", "--help"], "proxy-ctl flows --service default/web")]
#[case(&["monitor", "--help"], "proxy-ctl monitor --reason no_endpoints")]
#[case(&["cleanup", "--help"], "proxy-ctl cleanup")]
#[case(&["probe", "--help"], "proxy-ctl probe --config")]
#[case(&["config", "--help"], "proxy-ctl config --config")]
#[case(&["completion", "--help"], "proxy-ctl completion bash")]
#[case(&["man", "--help"], "proxy-ctl man --directory")]
fn help_has_an_example(#[case] args: &[&str], #[case] example: &str) {
    let text = printed(&proxy_ctl(args));
    assert!(text.contains(example), "{text}");
}

#[test]
fn version_includes_the_build_of_the_bpf_object() {
    let text = printed(&proxy_ctl(&["--version"]));
    assert!(text.starts_with(concat!("proxy-ctl ", env!("CARGO_PKG_VERSION"))), "{text}");
    assert!(text.contains("BPF object: "), "{text}");
}

#[rstest]
#[case::of_proxy_ctl("proxy-ctl", "--version", "commit: ", "commit date: ")]
#[case::of_kube_proxy("kube-proxy", "--version=raw", "GitCommit:\"", "BuildDate:\"")]
fn version_names_the_commit_and_its_date(
    #[case] program: &str,
    #[case] flag: &str,
    #[case] commit: &str,
    #[case] date: &str,
) {
    let folder = TempDir::new().unwrap();
    let text = printed(&called(program, folder.path(), &[flag]));
    let told = |name: &str| text.split(name).nth(1).unwrap_or_default().to_owned();
    let or_unknown = |known: &str| if known.is_empty() { "unknown".to_owned() } else { known.to_owned() };
    assert!(told(commit).starts_with(&or_unknown(env!("PROXY_CTL_COMMIT"))), "{text}");
    let seconds = env!("PROXY_CTL_COMMIT_TIME").parse().ok();
    let time = seconds.and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    let time = time.map(|time| time.to_string()).unwrap_or_default();
    assert!(told(date).starts_with(&or_unknown(&time)), "{text}");
}

#[rstest]
fn empty_state_prints_the_next_step(#[values("table", "json")] format: &str) {
    let folder = TempDir::new().unwrap();
    let pins = folder.path().join("bpf");
    // Only root may see if another mode has programmed something.
    let is_root = nix::unistd::geteuid().is_root();
    let commands: &[&str] =
        if is_root { &["status", "services", "backends", "flows", "cleanup"] } else { &["cleanup"] };
    for command in commands {
        let output = proxy_ctl(&[*command, "--bpffs", pins.to_str().unwrap(), "--output", format]);
        if format == "json" {
            json(&output);
        } else {
            assert!(printed(&output).contains("proxy-ctl"), "{command}: {}", stdout(&output));
        }
    }
    assert!(!pins.exists());
}

#[rstest]
#[case::two_slashes("a/b/c", "at most one slash")]
#[case::an_address("10.96.0.16", "`proxy-ctl services` lists the names")]
fn what_is_no_name_of_a_service_is_told(#[case] name: &str, #[case] told: &str) {
    for args in [vec!["services", name], vec!["flows", "--service", name], vec!["monitor", "--service", name]]
    {
        let output = proxy_ctl(&args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(stderr(&output).contains(told), "{args:?}: {}", stderr(&output));
    }
}

#[test]
fn a_service_that_is_not_there_is_told() {
    let folder = TempDir::new().unwrap();
    for args in [["services", "nosuch"].as_slice(), &["flows", "--service", "nosuch"]] {
        let output = proxy_ctl(&[args, &["--bpffs", folder.path().to_str().unwrap()]].concat());
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        let told = stderr(&output);
        let is_told =
            told.contains("nosuch is not served on this node") || told.contains("permission denied");
        assert!(is_told, "{args:?}: {told}");
    }
}

#[test]
fn nothing_is_watched_where_nothing_is_programmed() {
    let folder = TempDir::new().unwrap();
    let pins = folder.path().join("bpf");
    let output = proxy_ctl(&["monitor", "--bpffs", pins.to_str().unwrap()]);
    refused(folder.path(), &output, "proxy-ctl");
    assert!(stdout(&output).is_empty());
}

/// Runs the binary by a link with another name.
fn called(name: &str, folder: &Path, args: &[&str]) -> Output {
    let link = folder.join(name);
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_proxy-ctl"), &link).unwrap();
    Command::new(link).args(args).current_dir(folder).output().unwrap()
}

#[test]
fn under_the_name_kube_proxy_it_takes_its_flags() {
    let folder = config("oomScoreAdj: 7");
    let args = ["--config=config.yaml", "--hostname_override=Node-A", "--write-config-to=written.yaml"];
    printed(&called("kube-proxy", folder.path(), &args));
    let written = fs::read_to_string(folder.path().join("written.yaml")).unwrap();
    let written: serde_json::Value = serde_saphyr::from_str(&written).unwrap();
    assert_eq!((&written["oomScoreAdj"], &written["hostnameOverride"]), (&7.into(), &"node-a".into()));
}

#[rstest]
#[case::version(&["--version"], "Kubernetes v1.36.1+proxy-ctl.")]
#[case::version_for_programs(&["--version=raw"], "version.Info{Major:\"1\", Minor:\"36\"")]
#[case::help(&["--help"], "--conntrack-max-per-core <INTEGER>")]
#[case::short_help(&["-h"], "--healthz-bind-address <ADDRESS:PORT>")]
fn under_the_name_kube_proxy_it_prints_its_version_and_help(#[case] args: &[&str], #[case] answer: &str) {
    let folder = TempDir::new().unwrap();
    let text = printed(&called("kube-proxy", folder.path(), args));
    assert!(text.contains(answer), "{text}");
}

#[test]
fn under_any_other_name_it_has_commands() {
    let folder = TempDir::new().unwrap();
    let output = called("kube-proxy-2", folder.path(), &["--config=x"]);
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    assert!(stderr(&output).contains("Usage: "), "{}", stderr(&output));
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_str(&printed(output)).unwrap()
}

#[test]
fn config_prints_each_value_and_its_origin() {
    let folder = config("conntrack: {min: 5}\nmode: ipvs");
    let with =
        |format| configured("config", folder.path(), &["-v2", "--conntrack-min=6", "--output", format]);

    let told = json(&with("json"));
    let origin = |field: &str| {
        let values = told["values"].as_array().unwrap();
        values.iter().find(|value| value["field"] == field).unwrap()["origin"].clone()
    };
    assert_eq!(origin("conntrack.min"), "file");
    assert_eq!(origin("conntrack.maxPerCore"), "default");
    assert_eq!(origin("logging.verbosity"), "--v");
    assert_eq!(told["config"]["conntrack"]["min"], 5);
    assert!(told["warnings"][0].as_str().unwrap().starts_with("--conntrack-min is ignored"), "{told}");
    // The field belongs to another mode.
    assert!(!stdout(&with("table")).contains("nftables.syncPeriod"));
    let is_told = |line: &str| line.starts_with("logging.verbosity") && line.ends_with("--v");
    assert!(stdout(&with("table")).lines().any(is_told));
    let yaml: serde_json::Value = serde_saphyr::from_str(&stdout(&with("yaml"))).unwrap();
    assert_eq!(yaml, told["config"]);
    assert!(stderr(&with("xml")).contains("--output must be table, json or yaml, found \"xml\""));
}

#[test]
fn settings_that_a_file_cannot_have_are_warnings() {
    let args = ["--healthz-port=0", "--iptables-min-sync-period=0", "--profiling", "--output", "yaml"];
    let output = proxy_ctl(&[&["config"], &args[..]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let told = stderr(&output);
    let lost: Vec<_> = told.lines().filter(|line| line.contains("cannot be expressed in a file")).collect();
    assert_eq!(
        lost,
        [
            "warning: healthzBindAddress - cannot be expressed in a file, where it means 0.0.0.0:10256",
            "warning: iptables.minSyncPeriod 0s cannot be expressed in a file, where it means 1s",
        ]
    );
}

#[test]
fn probe_prints_facts_and_the_chosen_mode() {
    let folder = config("ebpf: {socketLoadBalancing: off}");
    let output = configured("probe", folder.path(), &["-o", "json"]);
    let told: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert!(told["facts"]["kernel"].is_string() && told["facts"]["capabilities"].is_array(), "{told}");
    // The test does not depend on the modes that this machine can run.
    assert_eq!(output.status.success(), told["choice"]["mode"].is_string(), "{told}");
    assert_eq!(output.status.success(), told["refusal"].is_null(), "{told}");
    let modes: Vec<_> =
        told["modes"].as_array().unwrap().iter().map(|mode| mode["mode"].as_str().unwrap()).collect();
    assert_eq!(modes, ["ebpf", "nftables", "iptables", "ipvs", "userspace"]);
    for mode in told["modes"].as_array().unwrap() {
        assert_eq!(mode["canRun"], mode["missing"].as_array().unwrap().is_empty(), "{mode}");
        for need in mode["needs"].as_array().unwrap() {
            assert!(told["facts"].get(need.as_str().unwrap()).is_some(), "{need} is no fact");
        }
    }
}

#[test]
fn probe_says_what_a_mode_lacks_and_what_replaces_it() {
    let folder = config("mode: ebpf\nebpf: {cgroup: /nonexistent}");
    let ask = |more: &[&str]| configured("probe", folder.path(), more);
    let lacks = "ebpf.cgroup must be a folder of cgroup v2, found /nonexistent";
    let asked = ask(&[]);
    assert_eq!(asked.status.code(), Some(1), "the mode that was asked for cannot run");
    assert!(stderr(&asked).contains(lacks), "{}", stderr(&asked));
    let table = stdout(&asked);
    assert!(table.contains("mode asked for") && table.contains(lacks), "{table}");
    let told: serde_json::Value = serde_json::from_str(&stdout(&ask(&["-o", "json"]))).unwrap();
    let fallback = told["choice"]["fallback"].as_str().or(told["refusal"].as_str()).unwrap();
    assert!(fallback.contains("mode ebpf cannot run here") && fallback.contains(lacks), "{told}");

    let refused = ask(&["--mode-fallback=false"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("mode ebpf cannot run here"), "{}", stderr(&refused));
    assert!(!stdout(&refused).contains("replaces it"), "{}", stdout(&refused));
}

#[rstest]
#[case("bash", "complete -F")]
#[case("zsh", "#compdef proxy-ctl")]
#[case("fish", "complete -c proxy-ctl")]
fn completions_have_commands_and_flags(#[case] shell: &str, #[case] expected: &str) {
    let text = stdout(&proxy_ctl(&["completion", shell]));
    assert!(text.contains(expected), "{text}");
    for word in ["conntrack-max-per-core", "services", "write-config-to"] {
        assert!(text.contains(word), "{word}");
    }
    if shell == "bash" {
        let checked = Command::new("bash").args(["-n", "-c", &text]).output().unwrap();
        assert!(checked.status.success(), "{}", stderr(&checked));
    }
}

/// Returns what bash offers for the last of these words, by the printed function.
fn completed(words: &[&str]) -> Vec<String> {
    const CALL: &str = r#"
        source <("$1" completion bash); shift
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
        _proxy__ctl "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        printf '%s\n' "${COMPREPLY[@]}""#;
    let called = Command::new("bash")
        .args(["-c", CALL, "bash", env!("CARGO_BIN_EXE_proxy-ctl"), "proxy-ctl"])
        .args(words)
        .output()
        .unwrap();
    printed(&called).split_whitespace().map(str::to_owned).collect()
}

#[rstest]
#[case::commands(&["sta"], &["status"])]
#[case::flags_of_a_command(&["status", "--out"], &["--output"])]
#[case::flags_of_a_command_with_a_hyphen(&["rollout-status", "--bp"], &["--bpffs"])]
#[case::flags_after_a_global_one(&["--bpffs", "/sys/fs/bpf", "flows", "--serv"], &["--service"])]
#[case::flags_of_run(&["run", "--conntrack-max"], &["--conntrack-max-per-core"])]
#[case::formats(&["status", "--output", ""], &["table", "json"])]
#[case::formats_of_probe(&["probe", "--output", ""], &["table", "json"])]
#[case::formats_of_config(&["config", "--output", ""], &["table", "json", "yaml"])]
#[case::modes(&["run", "--proxy-mode", ""], &["ebpf", "nftables", "iptables", "ipvs", "userspace"])]
#[case::modes_of_probe(&["probe", "--proxy-mode", "ip"], &["iptables", "ipvs"])]
#[case::log_formats(&["run", "--logging-format", ""], &["text", "json"])]
#[case::schedulers(&["run", "--ipvs-scheduler", "w"], &["wrr", "wlc"])]
#[case::reasons(&["monitor", "--reason", "no_end"], &["no_endpoints"])]
#[case::protocols(&["flows", "--protocol", ""], &["tcp", "udp"])]
#[case::states(&["flows", "--state", "clo"], &["closing"])]
#[case::shells(&["completion", "z"], &["zsh"])]
fn bash_completes(#[case] words: &[&str], #[case] expected: &[&str]) {
    assert_eq!(completed(words), expected);
}

#[test]
fn manual_pages_are_written() {
    let folder = TempDir::new().unwrap();
    let pages = folder.path().join("man1");
    printed(&proxy_ctl(&["man", "--directory", pages.to_str().unwrap()]));
    let run = fs::read_to_string(pages.join("proxy-ctl-run.1")).unwrap();
    assert!(run.contains("conntrack\\-max\\-per\\-core"), "{run}");
    assert!(pages.join("proxy-ctl.1").exists() && pages.join("proxy-ctl-services.1").exists());
}
