//! What a scenario is.

use std::fmt;

use anyhow::{Error, Result};
use lab::{
    Protocol,
    address::{FAMILIES, Family},
};

use serde_json::{Value, json};

use crate::{setting::Setting, world::World};

pub type Run = fn(&mut World, Variant) -> Result<()>;

/// A scenario: runs once for each of its variants.
pub struct Case {
    pub name: &'static str,
    pub variants: Variants,
    /// Part of the small set for virtual machines.
    pub core: bool,
    /// Where the result is known to differ. Such a case must fail there, with these words.
    pub differs: fn(&Setting, Variant) -> Option<Difference>,
    /// Whether there is anything to ask of this proxy.
    pub concerns: fn(&Setting) -> bool,
    /// What the proxies' configuration has beyond what every lab needs. Cases with the same stand together: others mean
    /// other processes.
    pub configuration: fn() -> Value,
    pub run: Run,
}

impl Case {
    pub const fn new(name: &'static str, variants: Variants, run: Run) -> Self {
        Self {
            name,
            variants,
            core: false,
            differs: |_, _| None,
            concerns: |_| true,
            configuration: || json!({}),
            run,
        }
    }

    pub const fn core(mut self) -> Self {
        self.core = true;
        self
    }

    pub const fn configured(mut self, configuration: fn() -> Value) -> Self {
        self.configuration = configuration;
        self
    }

    /// In other settings there is no such case.
    pub const fn concerns(mut self, concerns: fn(&Setting) -> bool) -> Self {
        self.concerns = concerns;
        self
    }

    pub const fn differs(mut self, differs: fn(&Setting, Variant) -> Option<Difference>) -> Self {
        self.differs = differs;
        self
    }
}

/// What a case meets where it is known to fail.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Difference {
    pub why: &'static str,
    /// The error has one of these: another error is a failure.
    pub says: &'static [&'static str],
}

impl Difference {
    pub fn explains(&self, error: &Error) -> bool {
        let error = format!("{error:#}");
        self.says.iter().any(|words| error.contains(words))
    }
}

/// What checks and their contexts say.
pub mod says {
    pub const NOT_ANSWERED: &[&str] = &["is not answered: "];
    pub const NOT_DROPPED: &[&str] = &["expected dropped, found "];
    pub const OTHER_CLIENT: &[&str] = &[" as the address of "];
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Variant {
    pub protocol: Protocol,
    pub family: Family,
}

impl fmt::Display for Variant {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} {}", self.protocol, self.family)
    }
}

#[derive(Clone, Copy, Debug)]
pub enum Variants {
    /// TCP and UDP, IPv4 and IPv6.
    All,
    Tcp,
    Udp,
    /// TCP and UDP over IPv4.
    V4,
    /// The scenario looks at everything at once.
    Once,
}

impl Variants {
    pub fn list(self) -> Vec<Variant> {
        let protocols: &[Protocol] = match self {
            Self::All | Self::V4 => &[Protocol::Tcp, Protocol::Udp],
            Self::Tcp | Self::Once => &[Protocol::Tcp],
            Self::Udp => &[Protocol::Udp],
        };
        let families: &[Family] = match self {
            Self::All | Self::Tcp | Self::Udp => &FAMILIES,
            Self::V4 | Self::Once => &[Family::V4],
        };
        let every = |protocol: &Protocol| {
            let protocol = *protocol;
            families.iter().map(move |family| Variant { protocol, family: *family })
        };
        protocols.iter().flat_map(every).collect()
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;
    use lab::Outcome;

    use super::*;
    use crate::{
        check,
        setting::{PathKind, ProxyKind},
    };

    const SETTING: Setting = Setting::new(ProxyKind::Userspace, PathKind::Packets);

    #[test]
    fn a_difference_is_what_its_check_says_and_no_other_error() {
        let refused = [Outcome::Refused { micros: 7 }];
        let in_context = |error: Error| error.context("from node1 to 10.96.0.1:80");
        for (says, error) in [
            (says::NOT_ANSWERED, check::answered_by(&refused, &["web-1"]).unwrap_err()),
            (says::NOT_DROPPED, check::dropped(SETTING, &refused).unwrap_err()),
        ] {
            let difference = Difference { why: "it does", says };
            assert!(difference.explains(&in_context(error)));
            assert!(!difference.explains(&in_context(anyhow!("agent node1 is gone"))));
            assert!(!difference.explains(&in_context(anyhow!("node1 serves version 7: not after 60 s"))));
        }
    }
}
