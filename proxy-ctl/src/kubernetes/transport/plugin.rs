//! The credential plugin: a program that the kubeconfig names in `users[].user.exec`.
//!
//! kube can run it too. But kube sets no time limit, runs it three times for each client, and shows
//! its environment in the error.

use std::{
    io,
    process::{ExitStatus, Output, Stdio},
    time::Duration,
};

use base64::prelude::{BASE64_STANDARD, Engine as _};
use jiff::Timestamp;
use kube::config::{AuthInfo, ExecConfig, ExecInteractiveMode};
use nix::{sys::signal, unistd::Pid};
use serde::Deserialize;
use serde_json::json;
use tokio::process::{Child, Command};

use super::token_file::bearer;

/// The time after which a plugin is killed.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub(crate) enum PluginError {
    #[error("credential plugin: users[].user.exec.command of the kubeconfig is missing")]
    NoCommand,
    #[error(
        "credential plugin {command}: interactiveMode is Always, but nobody can answer it here; the kubeconfig needs \
         another plugin or a token file"
    )]
    Interactive { command: String },
    #[error(
        "credential plugin {command}: cannot be run: {source}; users[].user.exec.command of the kubeconfig names it"
    )]
    Start { command: String, source: io::Error },
    #[error(
        "credential plugin {command}: no answer within {} s, so it was ended; run it by hand to see what it waits for", limit.as_secs()
    )]
    Silent { command: String, limit: Duration },
    #[error(
        "credential plugin {command}: failed with {status}; run it by hand to see why: what it wrote ({written} bytes) may \
         hold credentials and is not shown"
    )]
    Failed { command: String, status: ExitStatus, written: usize },
    #[error("credential plugin {command}: {problem}")]
    Answer { command: String, problem: &'static str },
}

/// An ExecCredential, reduced to the fields that are used.
#[derive(Deserialize)]
struct ExecCredential {
    status: Option<PluginStatus>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PluginStatus {
    token: Option<String>,
    client_certificate_data: Option<String>,
    client_key_data: Option<String>,
    expiration_timestamp: Option<Timestamp>,
}

/// Runs the plugin and puts its credentials into `user`. Returns when they expire, if the plugin
/// says so.
pub(crate) async fn ask(
    plugin: &ExecConfig,
    user: &mut AuthInfo,
    limit: Duration,
) -> Result<Option<Timestamp>, PluginError> {
    let command = plugin.command.clone().ok_or(PluginError::NoCommand)?;
    if plugin.interactive_mode == Some(ExecInteractiveMode::Always) {
        return Err(PluginError::Interactive { command });
    }
    let child =
        start(&command, plugin).map_err(|source| PluginError::Start { command: command.clone(), source })?;
    let Some(output) = output(child, limit).await else {
        return Err(PluginError::Silent { command, limit });
    };
    let output = output.map_err(|source| PluginError::Start { command: command.clone(), source })?;
    if !output.status.success() {
        let written = output.stderr.len();
        return Err(PluginError::Failed { command, status: output.status, written });
    }
    let problem = |problem| PluginError::Answer { command: command.clone(), problem };
    // The parser's error would quote what it has read, which is secret.
    let answer: ExecCredential = serde_saphyr::from_slice(&output.stdout)
        .map_err(|_| problem("its answer is not an ExecCredential of client.authentication.k8s.io"))?;
    let status = answer.status.ok_or_else(|| problem("its answer has no status"))?;
    match (status.token, status.client_certificate_data, status.client_key_data) {
        (None, None, None) => {
            return Err(problem("status of its answer has neither token nor clientCertificateData"));
        }
        (_, Some(_), None) => return Err(problem("status.clientKeyData of its answer is missing")),
        (_, None, Some(_)) => return Err(problem("status.clientCertificateData of its answer is missing")),
        (Some(token), _, _) if bearer(&token).is_err() => {
            return Err(problem("status.token of its answer holds characters that no token has"));
        }
        (token, certificate, key) => {
            user.token = token.map(Into::into);
            user.client_certificate_data = certificate.map(|pem| BASE64_STANDARD.encode(pem));
            user.client_key_data = key.map(|pem| BASE64_STANDARD.encode(pem).into());
        }
    }
    Ok(status.expiration_timestamp)
}

fn start(command: &str, plugin: &ExecConfig) -> io::Result<Child> {
    let cluster = plugin.cluster.as_ref().filter(|_| plugin.provide_cluster_info);
    let question = json!({
        "apiVersion": plugin.api_version, "kind": "ExecCredential",
        "spec": {"interactive": false, "cluster": cluster},
    });
    let environment = plugin.env.iter().flatten();
    Command::new(command)
        .args(plugin.args.iter().flatten())
        .envs(environment.filter_map(|variable| Some((variable.get("name")?, variable.get("value")?))))
        .env("KUBERNETES_EXEC_INFO", question.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // The plugin gets a process group, so that the processes it starts can be killed with it.
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
}

/// Returns what the plugin has written when it ends. None if it did not end within the limit and
/// was killed.
async fn output(child: Child, limit: Duration) -> Option<io::Result<Output>> {
    let group = child.id().and_then(|id| i32::try_from(id).ok());
    let output = tokio::time::timeout(limit, child.wait_with_output()).await;
    if output.is_err()
        && let Some(group) = group
    {
        // The plugin and its group may have ended already, so an error is ignored.
        let _ = signal::killpg(Pid::from_raw(group), signal::Signal::SIGKILL);
    }
    output.ok()
}

#[cfg(test)]
mod tests {
    use std::{fs, thread, time::Instant};

    use rstest::rstest;

    use super::*;

    /// The longest wait for a process. Only a failing test waits so long.
    const PATIENCE: Duration = Duration::from_secs(60);
    const GOOD: &str = r#"{"kind": "ExecCredential", "status": {"token": "secret"}}"#;

    fn shell(script: &str) -> ExecConfig {
        ExecConfig {
            command: Some("/bin/sh".into()),
            args: Some(vec!["-c".into(), script.into()]),
            ..ExecConfig::default()
        }
    }

    async fn answer(script: &str) -> Result<(AuthInfo, Option<Timestamp>), String> {
        let mut user = AuthInfo::default();
        let expires = ask(&shell(script), &mut user, LIMIT).await.map_err(|error| error.to_string())?;
        Ok((user, expires))
    }

    #[tokio::test]
    async fn a_token_is_taken_with_the_time_when_it_expires() {
        let (user, expires) = answer(&format!("echo '{GOOD}'")).await.unwrap();
        assert!(user.token.is_some() && expires.is_none());
        let yaml = "echo 'status: {token: secret, expirationTimestamp: \"2030-01-01T00:00:00Z\"}'";
        let (_, expires) = answer(yaml).await.unwrap();
        assert_eq!(expires.unwrap().to_string(), "2030-01-01T00:00:00Z");
    }

    #[tokio::test]
    async fn a_certificate_is_taken_as_a_kubeconfig_has_it() {
        let script = r#"echo '{"status": {"clientCertificateData": "cert", "clientKeyData": "key"}}'"#;
        let (user, _) = answer(script).await.unwrap();
        assert_eq!(user.client_certificate_data.as_deref(), Some("Y2VydA=="));
        assert!(user.client_key_data.is_some() && user.token.is_none());
    }

    #[tokio::test]
    async fn the_plugin_is_told_that_nobody_can_answer_it() {
        let script =
            r#"case "$KUBERNETES_EXEC_INFO" in *'"interactive":false'*) echo "$ANSWER";; *) exit 3;; esac"#;
        let environment = [("name", "ANSWER"), ("value", GOOD)];
        let environment = environment.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let plugin = ExecConfig { env: Some(vec![environment.into()]), ..shell(script) };
        let mut user = AuthInfo::default();
        ask(&plugin, &mut user, LIMIT).await.unwrap();
        assert!(user.token.is_some());
        let plugin = ExecConfig { interactive_mode: Some(ExecInteractiveMode::Always), ..plugin };
        let error = ask(&plugin, &mut user, LIMIT).await.unwrap_err().to_string();
        assert!(error.contains("/bin/sh: interactiveMode is Always"), "{error}");
    }

    /// The clock is paused and stands still while the blocking task runs. The limit thus passes
    /// once the plugin hangs and not before, however slowly its shell starts.
    #[tokio::test(start_paused = true)]
    async fn a_hung_plugin_is_ended_with_what_it_has_started_and_named() {
        let folder = tempfile::tempdir().unwrap();
        let started = folder.path().join("started");
        let plugin = shell(&format!("sleep 600 & echo $! > {}; wait", started.display()));
        let hangs = tokio::task::spawn_blocking(move || {
            let deadline = Instant::now() + PATIENCE;
            loop {
                let told = fs::read_to_string(&started).unwrap_or_default();
                if let Some(sleeper) = told.strip_suffix('\n') {
                    return sleeper.parse::<i32>().unwrap();
                }
                assert!(Instant::now() < deadline, "the plugin has not started: {told:?}");
                thread::sleep(Duration::from_millis(1));
            }
        });
        let limit = Duration::from_secs(1);
        let error = ask(&plugin, &mut AuthInfo::default(), limit).await.unwrap_err().to_string();
        assert!(error.starts_with("credential plugin /bin/sh: no answer within 1 s"), "{error}");
        let sleeper = hangs.await.unwrap();
        // A killed process stays a zombie until it is waited for.
        let deadline = Instant::now() + PATIENCE;
        let state = || fs::read_to_string(format!("/proc/{sleeper}/stat")).unwrap_or_default();
        while !state().is_empty() && !state().contains(") Z ") {
            assert!(Instant::now() < deadline, "it still runs: {}", state());
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[rstest]
    #[case::it_fails(
        "echo secret >&2; exit 3",
        "failed with exit status: 3; run it by hand to see why: what it wrote (7 bytes)"
    )]
    #[case::no_credential("echo '{\"token\": '", "its answer is not an ExecCredential")]
    #[case::no_status("echo '{}'", "its answer has no status")]
    #[case::nothing_in_it("echo '{\"status\": {}}'", "neither token nor clientCertificateData")]
    #[case::certificate_without_key(
        "echo '{\"status\": {\"clientCertificateData\": \"c\"}}'",
        "status.clientKeyData of its answer is missing"
    )]
    #[case::time_that_is_none(
        "echo '{\"status\": {\"token\": \"secret\", \"expirationTimestamp\": \"soon\"}}'",
        "its answer is not an ExecCredential"
    )]
    #[case::token_that_no_header_can_hold(
        r#"echo '{"status": {"token": "secret\u0001"}}'"#,
        "status.token of its answer holds characters that no token has"
    )]
    #[tokio::test]
    async fn what_goes_wrong_is_said_without_the_credentials(#[case] script: &str, #[case] expected: &str) {
        let error = answer(script).await.err().unwrap();
        assert!(error.starts_with("credential plugin /bin/sh: ") && error.contains(expected), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }

    #[tokio::test]
    async fn a_plugin_that_is_not_there_is_named() {
        let plugin = ExecConfig { command: Some("/nonexistent/plugin".into()), ..ExecConfig::default() };
        let error = ask(&plugin, &mut AuthInfo::default(), LIMIT).await.unwrap_err().to_string();
        assert!(
            error.starts_with("credential plugin /nonexistent/plugin: cannot be run: No such file"),
            "{error}"
        );
    }
}
