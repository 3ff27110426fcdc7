use rstest::rstest;

use super::*;

const GOOD: &str = "
current-context: main
contexts:
- name: main
  context: {cluster: here, user: proxy}
clusters:
- name: here
  cluster: {server: 'https://192.0.2.1:6443'}
users:
- name: proxy
  user: {token: secret}
";

fn load(text: &str) -> Result<Loaded, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kubeconfig");
    fs::write(&path, text).unwrap();
    let config = Config { kubeconfig: Some(path), ..Config::default() };
    config.load().map_err(|error| {
        error.to_string().replace("kubeconfig ", "").replace(&folder.path().display().to_string(), "")
    })
}

#[test]
fn a_good_one_is_taken_as_it_is() {
    let loaded = load(GOOD).unwrap();
    assert_eq!(loaded.client.cluster_url.to_string(), "https://192.0.2.1:6443/");
    assert!(loaded.token_file.is_none());
}

#[rstest]
#[case::no_yaml("main", "[", "/kubeconfig: not a kubeconfig: ")]
#[case::no_context(
    "current-context: main",
    "",
    "/kubeconfig: current-context: failed to determine current context"
)]
#[case::unknown_context(
    "current-context: main",
    "current-context: mian",
    "/kubeconfig: current-context: failed to load current context: mian"
)]
#[case::unknown_cluster(
    "cluster: here,",
    "cluster: there,",
    "/kubeconfig: contexts[name=main].context.cluster: failed to load the cluster of context: there"
)]
#[case::unknown_user(
    "user: proxy}",
    "user: nobody}",
    "/kubeconfig: contexts[name=main].context.user: no user is named \"nobody\""
)]
#[case::no_server(
    "server: 'https://192.0.2.1:6443'",
    "",
    "/kubeconfig: clusters[name=here].cluster.server: is missing"
)]
#[case::path_without_scheme(
    "https://192.0.2.1:6443",
    "192.0.2.1:6443/sub",
    "/kubeconfig: clusters[name=here].cluster.server: \"192.0.2.1:6443/sub\" must be a host and a port, or a URL"
)]
#[case::another_scheme(
    "https://192.0.2.1:6443",
    "ftp://192.0.2.1",
    "/kubeconfig: clusters[name=here].cluster.server: \"ftp://192.0.2.1\" must be a host and a port, or a URL"
)]
#[case::authority_file_missing(
    "server:",
    "certificate-authority: ca.crt, server:",
    "/kubeconfig: clusters[name=here].cluster.certificate-authority: failed to load certificate authority: failed to read file '\"/ca.crt\"': No such file"
)]
#[case::authority_is_not_base64(
    "server:",
    "certificate-authority-data: '?', server:",
    "/kubeconfig: clusters[name=here].cluster.certificate-authority: failed to load certificate authority: failed to decode base64 data"
)]
#[case::socks_proxy(
    "server:",
    "proxy-url: 'socks5://192.0.2.3:1', server:",
    "/kubeconfig: clusters[name=here].cluster.proxy-url: socks5://192.0.2.3:1/: only http:// proxies"
)]
#[case::certificate_without_key(
    "token: secret",
    "client-certificate-data: aGVsbG8K",
    "/kubeconfig: users[name=proxy].user.client-key: "
)]
#[case::certificate_is_none(
    "token: secret",
    "client-certificate-data: aGVsbG8K, client-key-data: aGVsbG8K",
    "/kubeconfig: users[name=proxy].user.client-certificate: "
)]
#[case::token_file_missing(
    "token: secret",
    "tokenFile: token",
    "/kubeconfig: users[name=proxy].user.tokenFile: token file /token: No such file"
)]
#[case::token_that_no_header_can_hold(
    "token: secret",
    "token: \"secret\\x01\"",
    "/kubeconfig: users[name=proxy].user.token: holds characters that no token has"
)]
fn a_mistake_is_named_by_file_and_field(#[case] right: &str, #[case] wrong: &str, #[case] expected: &str) {
    assert!(GOOD.contains(right));
    let error = load(&GOOD.replacen(right, wrong, 1)).err().unwrap();
    assert!(error.starts_with(expected), "{error}");
}

#[test]
fn a_missing_file_is_named() {
    let config = Config { kubeconfig: Some("/nonexistent/kubeconfig".into()), ..Config::default() };
    let error = config.load().err().unwrap().to_string();
    assert!(error.starts_with("kubeconfig /nonexistent/kubeconfig: cannot be read: No such file"), "{error}");
}

#[test]
fn master_overrides_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kubeconfig");
    fs::write(&path, GOOD).unwrap();
    let with = |master: &str| Config {
        kubeconfig: Some(path.clone()),
        master: Some(master.into()),
        ..Config::default()
    };
    assert_eq!(
        with("http://[2001:db8::1]:8080").load().unwrap().client.cluster_url,
        "http://[2001:db8::1]:8080/"
    );
    assert_eq!(with("192.0.2.9:8080").load().unwrap().client.cluster_url, "http://192.0.2.9:8080/");
    let error = with("192.0.2.9/sub").load().err().unwrap().to_string();
    assert!(error.starts_with("--master=192.0.2.9/sub: "), "{error}");
    let error = with("ftp://user:secret@192.0.2.9").load().err().unwrap().to_string();
    assert!(error.starts_with("--master=ftp://xxxxx@192.0.2.9: ") && !error.contains("secret"), "{error}");
}

/// kube-proxy 1.36 does the same with such files, whatever they say about TLS.
#[rstest]
#[case("192.0.2.1:8080", "http://192.0.2.1:8080/")]
#[case("localhost:8080/", "http://localhost:8080/")]
#[case("[2001:db8::1]:8080", "http://[2001:db8::1]:8080/")]
#[case("localhost", "http://localhost/")]
#[case("http://192.0.2.1:8080/sub", "http://192.0.2.1:8080/sub")]
fn a_server_without_tls_gets_no_credentials(#[case] server: &str, #[case] url: &str) {
    let quoted = format!("'{server}', insecure-skip-tls-verify: true");
    let plugin = "exec: {apiVersion: client.authentication.k8s.io/v1, command: /nonexistent/plugin}";
    let text = GOOD.replace("'https://192.0.2.1:6443'", &quoted);
    for user in ["token: secret", plugin, "username: me, password: secret"] {
        let loaded = load(&text.replace("token: secret", user)).unwrap();
        assert_eq!(loaded.client.cluster_url, url);
        assert_eq!(format!("{:?}", loaded.client.auth_info), format!("{:?}", AuthInfo::default()));
        assert!(loaded.token_file.is_none() && loaded.plugin.is_none() && loaded.is_user_withheld);
    }
}

#[test]
fn master_alone_is_an_api_server_that_asks_for_no_credentials() {
    let config = Config { master: Some("http://127.0.0.1:8001".into()), ..Config::default() };
    let loaded = config.load().unwrap();
    assert_eq!(loaded.client.cluster_url, "http://127.0.0.1:8001/");
    assert!(loaded.token_file.is_none() && loaded.plugin.is_none());
}

#[test]
fn a_token_file_is_read_without_the_white_space_around_it() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("token"), " secret\n").unwrap();
    let path = folder.path().join("kubeconfig");
    fs::write(&path, GOOD.replace("token: secret", "tokenFile: token")).unwrap();
    let loaded = Config { kubeconfig: Some(path), ..Config::default() }.load().unwrap();
    let file = loaded.token_file.unwrap();
    assert_eq!(file, folder.path().join("token"));
    assert_eq!(read_token(&file).unwrap(), "Bearer secret");
    fs::write(&file, "\n").unwrap();
    let error = read_token(&file).unwrap_err().to_string();
    assert!(error.ends_with("is empty"), "{error}");
}

#[test]
fn a_plugin_is_noticed_and_not_run() {
    let plugin = "exec: {apiVersion: client.authentication.k8s.io/v1, command: /nonexistent/plugin}";
    let loaded = load(&GOOD.replace("token: secret", plugin)).unwrap();
    assert_eq!(loaded.plugin.unwrap().command.as_deref(), Some("/nonexistent/plugin"));
    assert!(loaded.client.auth_info.exec.is_none() && load(GOOD).unwrap().plugin.is_none());
}

#[test]
fn who_asks_is_named() {
    let loaded = load(GOOD).unwrap();
    let agents: Vec<_> =
        loaded.client.headers.iter().filter(|(name, _)| *name == http::header::USER_AGENT).collect();
    let [(_, agent)] = agents.as_slice() else { panic!("{agents:?}") };
    let agent = agent.to_str().unwrap();
    assert!(agent.starts_with("kube-proxy/v1.") && agent.contains(" (linux/"), "{agent}");
    assert!(agent.ends_with(concat!(") proxy-ctl/", env!("CARGO_PKG_VERSION"))), "{agent}");
}

#[test]
fn the_fingerprint_changes_with_the_files() {
    let first = load(GOOD).unwrap().fingerprint;
    assert_eq!(load(GOOD).unwrap().fingerprint, first);
    assert_ne!(load(&GOOD.replace("secret", "other")).unwrap().fingerprint, first);
}

/// This test assumes that it does not run in a pod.
#[test]
fn outside_a_pod_what_is_missing_is_named() {
    let error = Config::default().load().err().unwrap().to_string();
    assert!(error.contains("KUBERNETES_SERVICE_HOST or KUBERNETES_SERVICE_PORT is not set"), "{error}");
    assert!(error.contains("--kubeconfig"), "{error}");
}

/// The errors of a parser tend to quote the lines around a mistake.
#[rstest]
#[case::no_yaml("token: secret", "token: secret, tokenFile: [")]
#[case::another_type("token: secret", "token: secret, username: [a]")]
#[case::twice("token: secret", "token: secret, token: secret")]
fn what_is_secret_is_in_no_error(#[case] right: &str, #[case] wrong: &str) {
    let error = load(&GOOD.replacen(right, wrong, 1)).err().unwrap();
    assert!(error.starts_with("/kubeconfig: not a kubeconfig: "), "{error}");
    assert!(!error.contains("secret") && error.contains("line"), "{error}");
}
