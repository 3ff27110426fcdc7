//! Keys and certificates, made by the openssl command: a CA, the API server's certificate, and the key that signs
//! service account tokens.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

pub(crate) struct Certificates {
    pub(crate) authority: PathBuf,
    pub(crate) server: PathBuf,
    pub(crate) server_key: PathBuf,
    pub(crate) account_key: PathBuf,
}

impl Certificates {
    /// Makes all of them in `folder`; what is there is replaced.
    pub(crate) fn create(folder: &Path, addresses: &[IpAddr]) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
        let made = Self {
            authority: folder.join("ca.crt"),
            server: folder.join("server.crt"),
            server_key: folder.join("server.key"),
            account_key: folder.join("service-account.key"),
        };
        let authority_key = folder.join("ca.key");
        let new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"];
        openssl(|command| {
            command.args(["req", "-x509"]).args(new_key).args(["-subj", "/CN=proxy-ctl test CA"]);
            command.args(["-addext", "keyUsage=critical,keyCertSign,cRLSign"]);
            command.arg("-keyout").arg(&authority_key).arg("-out").arg(&made.authority);
        })?;
        let names: Vec<String> = addresses.iter().map(|address| format!("IP:{address}")).collect();
        openssl(|command| {
            command.args(["req", "-x509"]).args(new_key).args(["-subj", "/CN=kube-apiserver"]);
            command.args(["-addext", "basicConstraints=critical,CA:FALSE"]);
            command
                .args(["-addext", &format!("subjectAltName=DNS:kubernetes.default.svc,{}", names.join(","))]);
            command.arg("-CA").arg(&made.authority).arg("-CAkey").arg(&authority_key);
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
