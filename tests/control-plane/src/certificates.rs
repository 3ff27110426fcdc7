//! Keys and certificates that the openssl command makes: a CA, the API server's certificate, and
//! the key that signs tokens of service accounts.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

const NEW_KEY: [&str; 7] = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"];

pub(crate) struct Certificates {
    pub(crate) authority: PathBuf,
    authority_key: PathBuf,
    pub(crate) server: PathBuf,
    pub(crate) server_key: PathBuf,
    pub(crate) account_key: PathBuf,
}

impl Certificates {
    /// Makes `name.crt` and `name.key` in `folder`. The API server knows `user` by them.
    pub(crate) fn client(&self, folder: &Path, name: &str, user: &str) -> Result<(PathBuf, PathBuf)> {
        let (certificate, key) = (folder.join(format!("{name}.crt")), folder.join(format!("{name}.key")));
        openssl(|command| {
            command.args(["req", "-x509"]).args(NEW_KEY).args(["-subj", &format!("/CN={user}")]);
            command.args(["-addext", "basicConstraints=critical,CA:FALSE"]);
            command.args(["-addext", "extendedKeyUsage=clientAuth"]);
            command.arg("-CA").arg(&self.authority).arg("-CAkey").arg(&self.authority_key);
            command.arg("-keyout").arg(&key).arg("-out").arg(&certificate);
        })?;
        Ok((certificate, key))
    }

    /// Makes all of them in `folder`, and replaces what is there.
    pub(crate) fn create(folder: &Path, addresses: &[IpAddr]) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
        let made = Self {
            authority: folder.join("ca.crt"),
            authority_key: folder.join("ca.key"),
            server: folder.join("server.crt"),
            server_key: folder.join("server.key"),
            account_key: folder.join("service-account.key"),
        };
        openssl(|command| {
            command.args(["req", "-x509"]).args(NEW_KEY).args(["-subj", "/CN=proxy-ctl test CA"]);
            command.args(["-addext", "keyUsage=critical,keyCertSign,cRLSign"]);
            command.arg("-keyout").arg(&made.authority_key).arg("-out").arg(&made.authority);
        })?;
        let names: Vec<String> = addresses.iter().map(|address| format!("IP:{address}")).collect();
        openssl(|command| {
            command.args(["req", "-x509"]).args(NEW_KEY).args(["-subj", "/CN=kube-apiserver"]);
            command.args(["-addext", "basicConstraints=critical,CA:FALSE"]);
            command
                .args(["-addext", &format!("subjectAltName=DNS:kubernetes.default.svc,{}", names.join(","))]);
            command.arg("-CA").arg(&made.authority).arg("-CAkey").arg(&made.authority_key);
            command.arg("-keyout").arg(&made.server_key).arg("-out").arg(&made.server);
        })?;
        openssl(|command| {
            // kube-apiserver does not read an EC key in PKCS #8.
            command.args(["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out"]);
            command.arg(&made.account_key);
        })?;
        Ok(made)
    }
}

fn openssl(arguments: impl FnOnce(&mut Command)) -> Result<()> {
    let mut command = Command::new("openssl");
    arguments(&mut command);
    let output = command.stdin(Stdio::null()).output().context("starting openssl")?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
