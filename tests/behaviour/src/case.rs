//! What a scenario is.

use std::fmt;

use anyhow::Result;
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
    /// Where the result is known to differ, and why. Such a case must fail there.
    pub differs: fn(&Setting, Variant) -> Option<&'static str>,
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

    pub const fn differs(mut self, differs: fn(&Setting, Variant) -> Option<&'static str>) -> Self {
        self.differs = differs;
        self
    }
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
