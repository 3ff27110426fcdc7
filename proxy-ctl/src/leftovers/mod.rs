//! What a former kube-proxy has left in the kernel, found and removed, in all its modes.
//!
//! Whoever swaps kube-proxy's image for ours leaves its rules behind: they go on leading to the endpoints of that time,
//! and to whoever gets their addresses next. [`names`] knows what is kube-proxy's, [`plan`] decides; [`nft`] reads and
//! writes nf_tables, where the rules of all modes are on most nodes.
//!
//! Everything is done in the network namespace of the calling thread.

pub mod names;
mod nft;
pub mod plan;

use serde::Serialize;

use crate::sys::CallError;

/// How much is removed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Extent {
    /// What somebody else serves now. What else kube-proxy's rules do for connections that are under way stays.
    Served,
    /// Everything, as `kube-proxy --cleanup` does.
    Everything,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Call(#[from] CallError),
}

impl Error {
    fn refused(errno: i32) -> Self {
        Self::Call(CallError::new("netlink batch of nf_tables", std::io::Error::from_raw_os_error(errno)))
    }
}

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum What {
    /// Rules in chains of others.
    Jumps,
    Chains,
    /// With everything in them.
    Tables,
}

impl What {
    pub fn name(self) -> &'static str {
        match self {
            Self::Jumps => "jumps",
            Self::Chains => "chains",
            Self::Tables => "tables",
        }
    }
}

/// Things of one kind in one place.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Part {
    /// `nftables ip nat`
    pub place: String,
    pub what: What,
    pub count: usize,
}

impl Part {
    fn new(place: String, what: What, count: usize) -> Self {
        Self { place, what, count }
    }
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} in {}", self.count, self.what.name(), self.place)
    }
}

/// Something of kube-proxy that somebody else relies on.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Kept {
    pub place: String,
    pub name: String,
    pub why: String,
}

impl Kept {
    fn new(place: String, name: String, why: String) -> Self {
        Self { place, name, why }
    }
}

/// What was done.
#[derive(Debug, Default)]
pub struct Removed {
    pub parts: Vec<Part>,
    pub kept: Vec<Kept>,
    pub problems: Vec<Error>,
}

/// What is there; nothing is changed.
#[derive(Debug, Default)]
pub struct Found {
    pub parts: Vec<Part>,
    pub problems: Vec<Error>,
}

impl Found {
    pub fn count(&self) -> usize {
        self.parts.iter().map(|part| part.count).sum()
    }
}

pub fn find() -> Found {
    let mut found = Found::default();
    match nft::find() {
        Ok(parts) => found.parts.extend(parts),
        Err(error) => found.problems.push(error),
    }
    found
}

/// Removes what can be removed: a problem in one place keeps nothing elsewhere. May be called again at any time.
pub fn remove(extent: Extent) -> Removed {
    let mut removed = Removed::default();
    match nft::remove(extent) {
        Ok((parts, kept)) => {
            removed.parts.extend(parts);
            removed.kept.extend(kept);
        }
        Err(error) => removed.problems.push(error),
    }
    removed
}
