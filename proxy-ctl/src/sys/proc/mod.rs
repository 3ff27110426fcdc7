//! Processes and the machine: /proc, locks, limits, credentials, clocks, and file systems.

pub mod clock;
pub mod credentials;
pub mod filesystem;
pub mod limits;
pub mod lock;
pub mod machine;
pub mod process;
pub mod ready;
