//! Measures Katran's program as ours are measured. Nanoseconds differ from machine to machine, so
//! their ratio in one run says more.
//!
//! `KATRAN=balancer.bpf.o cargo test -p packets -- --bench`. Katran's sources are GPL-2.0 and no
//! part of this tree. They must be compiled with `-DMAX_CONN_RATE=4000000000U`. Otherwise Katran
//! stores at most 125,000 flows a second, which is less than one run has.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use aya::{
    Ebpf, EbpfLoader,
    maps::{Array, HashMap},
    programs::Xdp,
};
use proxy_common::{
    family::V4,
    layout::PROTOCOL_TCP,
    packet::{TCP_ACK, TCP_SYN},
};

use crate::{
    cases::scene::{CLUSTER_IP, LOCAL},
    restored::Restored,
    wire::{Endpoint, KnownAddress, Segment, Wire, tcp},
    world::Verdict,
};

const PROGRAM: &str = "balancer_ingress";
/// Number of elements that one service has in Katran's map of backends.
const RING: u32 = 65_537;
const CLIENT_PORTS: u32 = 32_768;
const FROM: Endpoint = (KnownAddress::Client, 1_024);
const STRANGER: Endpoint = (KnownAddress::Stranger, 80);

pub(crate) struct Katran(Ebpf);

impl Katran {
    /// Loads the program with one service, one backend, and room for `flows` flows.
    pub(crate) fn load(object: &Path, flows: u32) -> Result<Self> {
        let object = fs::read(object).with_context(|| format!("reading {}", object.display()))?;
        let mut ebpf = EbpfLoader::new().map_max_entries("fallback_cache", flows).load(&object)?;
        let program: &mut Xdp = ebpf.program_mut(PROGRAM).context(PROGRAM)?.try_into()?;
        program.load()?;
        let mut service = [0_u8; 20];
        service[..4].copy_from_slice(&V4::address(CLUSTER_IP.0));
        service[16..18].copy_from_slice(&CLUSTER_IP.1.to_be_bytes());
        service[18] = PROTOCOL_TCP;
        let mut backend = [0_u8; 20];
        backend[..4].copy_from_slice(&V4::address(LOCAL.0));
        HashMap::<_, [u8; 20], [u32; 2]>::try_from(ebpf.map_mut("vip_map").context("vip_map")?)?
            .insert(service, [0_u32; 2], 0)?;
        Array::<_, [u8; 20]>::try_from(ebpf.map_mut("reals").context("reals")?)?.set(1, backend, 0)?;
        // The address at index 0 is the link address of the next hop.
        Array::<_, [u8; 8]>::try_from(ebpf.map_mut("ctl_array").context("ctl_array")?)?
            .set(0, [2_u8; 8], 0)?;
        let mut ring = Array::try_from(ebpf.map_mut("ch_rings").context("ch_rings")?)?;
        (0..RING).try_for_each(|index| ring.set(index, 1_u32, 0))?;
        Ok(Self(ebpf))
    }

    pub(crate) fn of_no_service(&self) -> Result<Restored> {
        self.restored(&tcp(FROM, STRANGER, TCP_ACK), 1, 0, Verdict::GoesOn)
    }

    /// Makes a runner for packets of `count` flows, all of which are stored.
    pub(crate) fn known_flows(&self, count: u32) -> Result<Restored> {
        let mut restored = self.restored(&tcp(FROM, CLUSTER_IP, TCP_ACK), count, 0, Verdict::SentBack)?;
        restored.nanoseconds(1, count)?;
        Ok(restored)
    }

    /// Makes a runner for packets that open `count` flows, from the number `first` on.
    pub(crate) fn new_flows(&self, count: u32, first: u32) -> Result<Restored> {
        self.restored(&tcp(FROM, CLUSTER_IP, TCP_SYN), count, first, Verdict::SentBack)
    }

    fn restored(&self, segment: &Segment, count: u32, first: u32, verdict: Verdict) -> Result<Restored> {
        const SOURCE: usize = 14 + 12;
        const SOURCE_PORT: usize = 14 + 20;
        let program = self.0.program(PROGRAM).context(PROGRAM)?;
        let packet = segment.bytes::<V4>();
        let change = |bytes: &mut [u8], number: u32| {
            let number = first + number;
            for (at, added) in [(SOURCE + 2, number / CLIENT_PORTS), (SOURCE_PORT, number % CLIENT_PORTS)] {
                let before = u16::from_be_bytes([bytes[at], bytes[at + 1]]);
                bytes[at..at + 2].copy_from_slice(&before.wrapping_add(added as u16).to_be_bytes());
            }
        };
        let mut restored = Restored::new(program, None, &packet, count, change)?;
        let output = restored.run()?;
        let grown = output.packet.len() - packet.len();
        let expected = if verdict == Verdict::SentBack { 20 } else { 0 };
        ensure!((output.verdict, grown) == (verdict, expected), "{:?}, longer by {grown}", output.verdict);
        Ok(restored)
    }
}
