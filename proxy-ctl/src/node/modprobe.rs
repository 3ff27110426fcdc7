//! Has the kernel load modules, by the node's own modprobe.

use std::{
    io,
    process::{Command, Stdio},
};

/// What became of a module that was asked for.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Modprobe {
    Loaded,
    /// There is no such program here, as in an image without one.
    Absent,
    /// With the program's words.
    Refused(String),
}

/// Needs CAP_SYS_MODULE where the module is not loaded yet.
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
