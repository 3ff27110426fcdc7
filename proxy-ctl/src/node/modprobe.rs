//! Makes the kernel load modules, by the node's own modprobe.

use std::{
    io,
    process::{Command, Stdio},
};

/// The result of loading a module.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Modprobe {
    Loaded,
    /// There is no modprobe here. An image need not have one.
    Absent,
    /// modprobe failed, with its error message.
    Refused(String),
}

/// Loads a module. Needs CAP_SYS_MODULE if the module is not loaded yet.
pub fn modprobe(module: &str) -> Modprobe {
    let ran = Command::new("modprobe").arg("--").arg(module).stdin(Stdio::null()).output();
    match ran {
        Ok(output) if output.status.success() => Modprobe::Loaded,
        Ok(output) => {
            let words = String::from_utf8_lossy(&output.stderr);
            Modprobe::Refused(words.lines().last().unwrap_or("modprobe failed").trim().to_owned())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Modprobe::Absent,
        Err(error) => Modprobe::Refused(format!("modprobe cannot be run: {error}")),
    }
}
