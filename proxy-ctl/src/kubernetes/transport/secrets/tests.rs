//! Tests that no secret is in an error, in the log or on a page. Secrets with a known text go
//! through every error about credentials.

use std::{ffi::OsString, fs, path::Path, sync::Arc};

use base64::prelude::{BASE64_STANDARD, Engine as _};
use http::HeaderValue;
use kube::client::Body;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};
use tracing::level_filters::LevelFilter;

use crate::{
    config::{CommandLine, Effective},
    kubernetes::{
        Config, Requests,
        failure::Failure,
        transport::{
            connection::{ApiConnection, connect},
            plugin,
            rate_limit::RateLimit,
        },
        wire::answer::ApiAnswer,
    },
    log::capture::logged,
};

/// The text in every secret below. It is also valid base64.
const SECRET: &str = "CanarySecret";

/// Writes a kubeconfig with this cluster and this user.
fn kubeconfig(folder: &Path, cluster: &str, user: &str) -> Config {
    let path = folder.join("kubeconfig");
    let text = format!(
        "current-context: c\ncontexts:\n- name: c\n  context: {{cluster: k, user: u}}\nclusters:\n- name: k\n  \
         cluster: {{{cluster}}}\nusers:\n- name: u\n  user: {user}\n"
    );
    fs::write(&path, text).unwrap();
    Config { kubeconfig: Some(path), ..Config::default() }
}

fn request() -> http::Request<Vec<u8>> {
    http::Request::get("/").body(Vec::new()).unwrap()
}

/// Returns the messages of a failed request of a watcher, and of one that writes an event.
async fn failures(config: Config) -> [String; 2] {
    let connection = ApiConnection::new(config, HeaderValue::from_static("*/*"), Requests::default());
    let connection = Arc::new(connection);
    let asked = async {
        let (client, _) = connection.client().await?;
        ApiAnswer::new(client.send(request().map(Body::from)).await?).await
    };
    let asked = asked.await.err().unwrap();
    let event = connection.lasting_client().request::<Value>(request()).await.unwrap_err();
    [asked, Failure::from(event)].map(|failure| failure.to_string())
}

/// Returns the same as [`failures`] for a server without TLS. To such a server the client does not
/// send the credentials of a kubeconfig's user, so this function sets them itself.
async fn failures_without_tls(config: Config, port: u16) -> [String; 2] {
    let mut loaded = config.load().unwrap();
    if let Some(plugin) = &loaded.plugin {
        plugin::ask(plugin, &mut loaded.client.auth_info, plugin::LIMIT).await.unwrap();
    }
    loaded.client.cluster_url = format!("http://127.0.0.1:{port}").parse().unwrap();
    let client = connect(loaded, &Arc::new(RateLimit::new(0.0, 0)), &Requests::default()).unwrap();
    let asked = ApiAnswer::new(client.send(request().map(Body::from)).await.unwrap()).await.err().unwrap();
    let event = client.request::<Value>(request()).await.unwrap_err();
    [asked, Failure::from(event)].map(|failure| failure.to_string())
}

/// Starts a server that sends back the request as an error.
async fn mirror(content_type: &'static str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = vec![0; 8192];
            let length = stream.read(&mut request).await.unwrap_or(0);
            let text = String::from_utf8_lossy(&request[..length]).into_owned();
            let body = match content_type {
                "application/json" => {
                    json!({"kind": "Status", "message": text, "reason": "x", "code": 502}).to_string()
                }
                _ => text,
            };
            let head = format!("HTTP/1.1 502 Bad Gateway\r\nContent-Type: {content_type}\r\n");
            let answer = format!("{head}Content-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len());
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    port
}

/// Returns the messages of kubeconfigs that are wrong.
fn of_kubeconfigs(folder: &Path) -> Vec<String> {
    let server = "server: 'https://192.0.2.1'";
    let token = folder.join("token");
    fs::write(&token, format!("{SECRET}\u{1}{SECRET}")).unwrap();
    let pem = format!("-----BEGIN {SECRET}");
    let [pem, half] =
        [pem, format!("-----BEGIN PRIVATE KEY-----\n{SECRET}\n")].map(|text| BASE64_STANDARD.encode(text));
    let users = [
        // Parsers tend to quote what they find instead of what they expect.
        SECRET.to_owned(),
        format!("[{SECRET}]"),
        format!("{{token: {{{SECRET}: {SECRET}}}}}"),
        format!("{{token: {SECRET}, username: [{SECRET}]}}"),
        format!("{{token: {SECRET}, token: {SECRET}}}"),
        format!("{{password: {SECRET}, username: [a]}}"),
        format!("{{client-key-data: [{SECRET}]}}"),
        format!("{{token: {SECRET}, tokenFile: ["),
        format!("{{token: \"{SECRET}"),
        format!("{{exec: {{command: c, env: [{{name: T, value: [{SECRET}]}}]}}}}"),
        format!("{{exec: {{command: c, env: {SECRET}, args: [{SECRET}]}}}}"),
        format!("{{exec: {{command: c, args: {SECRET}}}}}"),
        format!("{{exec: {{command: c, interactiveMode: {SECRET}}}}}"),
        format!("{{exec: {SECRET}}}"),
        format!("{{auth-provider: {SECRET}}}"),
        // These credentials can be read, but cannot be used.
        format!("{{client-certificate-data: '{SECRET}?', client-key-data: '{SECRET}?'}}"),
        format!("{{client-certificate-data: {SECRET}, client-key-data: {SECRET}}}"),
        format!("{{client-certificate-data: {pem}, client-key-data: {pem}}}"),
        format!("{{client-certificate-data: {half}, client-key-data: {half}}}"),
        format!("{{tokenFile: '{}'}}", token.display()),
        format!("{{token: \"{SECRET}\\x01\"}}"),
    ];
    let users = users.iter().map(|user| kubeconfig(folder, server, user).load());
    let mut said: Vec<String> = users.filter_map(|loaded| Some(loaded.err()?.to_string())).collect();
    for cluster in [
        format!("{server}, proxy-url: 'socks5://user:{SECRET}@192.0.2.3:1'"),
        format!("{server}, proxy-url: 'http://user:{SECRET}@192 .0.2.3:1'"),
        format!("server: 'ftp://user:{SECRET}@192.0.2.1'"),
        format!("server: 'https://user:{SECRET}@192 .0.2.1'"),
    ] {
        said.push(kubeconfig(folder, &cluster, "{token: t}").load().err().unwrap().to_string());
    }
    said
}

/// Returns the messages of credential plugins that fail.
async fn of_plugins(folder: &Path) -> Vec<String> {
    let mut said = Vec::new();
    for script in [
        "echo $S; echo $S $0 >&2; exit 3",
        "echo $S; echo $S >&2; kill -9 $$",
        "echo $S; echo $S >&2",
        "echo \"{status: {token: [$S]}}\"",
        "echo \"{status: {token: $S, expirationTimestamp: $S}}\"",
        "echo \"{status: {clientCertificateData: $S}}\"",
        "echo \"{status: {clientCertificateData: $S, clientKeyData: $S}}\"",
        "echo \"{status: {token: \\\"$S\\\\u0001\\\"}}\"",
    ] {
        let plugin = json!({
            "command": "/bin/sh", "args": ["-c", script, SECRET], "env": [{"name": "S", "value": SECRET}],
        });
        let user = format!("{{exec: {plugin}}}");
        said.extend(failures(kubeconfig(folder, "server: 'https://127.0.0.1:1'", &user)).await);
    }
    let lost =
        format!("{{exec: {{command: /nonexistent, args: [{SECRET}], env: [{{name: S, value: {SECRET}}}]}}}}");
    said.extend(failures(kubeconfig(folder, "server: 'https://127.0.0.1:1'", &lost)).await);
    said
}

/// Returns the messages of servers that send the request back.
async fn of_mirrors(folder: &Path) -> Vec<String> {
    let token = folder.join("good");
    fs::write(&token, format!("{SECRET}-from-a-file\n")).unwrap();
    let plugin = json!({
        "command": "/bin/sh", "args": ["-c", format!("echo '{{\"status\": {{\"token\": \"{SECRET}\"}}}}'")],
    });
    let users = [
        format!("{{token: {SECRET}}}"),
        format!("{{username: me, password: '{SECRET}\"<'}}"),
        format!("{{tokenFile: '{}'}}", token.display()),
        format!("{{exec: {plugin}}}"),
    ];
    let mut said = Vec::new();
    for content_type in ["text/html", "application/json"] {
        let port = mirror(content_type).await;
        for user in &users {
            let answers =
                failures_without_tls(kubeconfig(folder, "server: 'https://192.0.2.1'", user), port).await;
            assert!(
                answers.iter().all(|answer| answer.to_lowercase().contains("authorization: ")),
                "{answers:?}"
            );
            said.extend(answers);
        }
    }
    let proxy = format!("server: 'https://192.0.2.1', proxy-url: 'http://user:{SECRET}@127.0.0.1:1'");
    said.extend(failures(kubeconfig(folder, &proxy, "{token: t}")).await);
    said
}

/// Returns true if a text holds a secret in any encoding. The base64 text of basic authentication
/// does not contain `SECRET` itself.
fn holds_a_secret(text: &str) -> bool {
    let basic = BASE64_STANDARD.encode(format!("me:{SECRET}\"<"));
    text.contains(SECRET)
        || text.contains(&basic)
        || text.contains(&format!("{:?}", SECRET.as_bytes()).replace(['[', ']'], ""))
}

#[test]
fn a_secret_is_in_no_error_log_or_page() {
    let folder = TempDir::new().unwrap();
    let mut said = of_kubeconfigs(folder.path());
    assert!(said.len() > 20, "{said:#?}");
    let format = tracing_subscriber::fmt::format();
    let log = logged(format, LevelFilter::TRACE, || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        said.extend(runtime.block_on(async {
            let mut said = of_plugins(folder.path()).await;
            said.extend(of_mirrors(folder.path()).await);
            said
        }));
    });
    let line =
        CommandLine::parse([OsString::from(format!("--master=https://user:{SECRET}@192.0.2.1"))]).unwrap();
    let flags = format!("{:?}", line.values());
    assert!(flags.contains("192.0.2.1"));
    let configuration = Effective::load(None, &line).unwrap().config.to_document().to_string();
    said.extend([flags, configuration]);
    let secret: Vec<_> = said.iter().chain(&log).filter(|text| holds_a_secret(text)).collect();
    assert!(secret.is_empty(), "{secret:#?}");
}
