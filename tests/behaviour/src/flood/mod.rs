//! Floods of forged packets, and connections that end badly, beside connections that go on. The
//! entries of the flow maps are counted before, during and after.
//!
//! [`table`] runs one flood after the other and prints what became of the maps. [`soak`] runs flows
//! with every kind of end, and then expects the maps to have the entries of the living flows and no
//! others.

mod ends;
mod entries;
mod packet;
pub mod soak;
pub mod table;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::{Duration, Instant},
};

use anyhow::Result;
use lab::{Lab, Netns, address::Family, cluster::FABRIC};

/// The extent of a run.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Lifetimes are the defaults, and each flood waits until its entries are gone.
    pub is_full: bool,
    /// Packets a second of a flood, and flows a second of the soak.
    pub rate: u32,
    pub duration: Duration,
}

/// The first forged address of each family. Its lower bits count clients.
const FORGED4: Ipv4Addr = Ipv4Addr::new(100, 64, 0, 0);
const FORGED6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xf0, 0, 0, 0, 0, 0);
/// The number of the addresses in 100.64.0.0/10.
const CLIENTS: u32 = 1 << 22;

/// Returns the address of a forged client.
fn forged(family: Family, number: u32) -> IpAddr {
    let number = number % CLIENTS;
    match family {
        Family::V4 => Ipv4Addr::from_bits(FORGED4.to_bits() + number).into(),
        Family::V6 => Ipv6Addr::from_bits(FORGED6.to_bits() + u128::from(number)).into(),
    }
}

/// Where the fabric sends answers to forged addresses. The routes are removed with the value.
struct ForgedRange<'a>(&'a Netns);

impl<'a> ForgedRange<'a> {
    /// Answers end at the fabric, so that nobody is asked for the addresses.
    fn to_nowhere(lab: &'a Lab) -> Result<Self> {
        let range = Self(lab.netns(FABRIC)?);
        range.0.ip(&format!("route add blackhole {FORGED4}/10\nroute add blackhole {FORGED6}/64\n"))?;
        Ok(range)
    }

    /// Somebody of the lab sees the answers.
    fn to(lab: &'a Lab, name: &str) -> Result<Self> {
        let (range, via) = (Self(lab.netns(FABRIC)?), lab.netns(name)?.addresses);
        range
            .0
            .ip(&format!("route add {FORGED4}/10 via {}\nroute add {FORGED6}/64 via {}\n", via.v4, via.v6))?;
        Ok(range)
    }
}

impl Drop for ForgedRange<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.0.ip(&format!("route del {FORGED4}/10\nroute del {FORGED6}/64\n")) {
            eprintln!("floods: {error:#}");
        }
    }
}

/// The pause between two bursts of packets.
const BURST: Duration = Duration::from_millis(10);

/// Calls `send` with the numbers from 0 on, `rate` times a second, for `duration`. Returns the real
/// rate a second.
fn at_pace(rate: u32, duration: Duration, mut send: impl FnMut(u32) -> Result<()>) -> Result<f64> {
    let (start, mut sent) = (Instant::now(), 0_u32);
    while start.elapsed() < duration {
        let due = (start.elapsed().min(duration).as_secs_f64() * f64::from(rate)) as u32;
        for number in sent..due {
            send(number)?;
        }
        sent = due;
        std::thread::sleep(BURST);
    }
    Ok(f64::from(sent) / start.elapsed().as_secs_f64())
}
