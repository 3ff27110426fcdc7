//! Runs a program many times by one BPF_PROG_TEST_RUN, on packets that come in turn.
//!
//! The kernel gives each run the packet that the run before has left. So another program runs
//! first. It restores the packet's length, writes the headers of the next packet from a map, and
//! calls the measured program. The time that this takes is measured with a program that only
//! returns.

use std::{
    fs,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    path::PathBuf,
    process,
};

use anyhow::{Context as _, Result, ensure};
use aya::{
    TestRun as _, TestRunOptions, TestRunResult,
    maps::{Map, MapData, ProgramArray},
    programs::{Program, ProgramFd, SchedClassifier, Xdp},
};
use aya_obj::{generated::bpf_attach_type::BPF_XDP, programs::xdp::XdpAttachType};
use proxy_ctl::sys::{
    bpf::{self, MapInfo, map::Map as TypedMap},
    proc::filesystem::provide_bpffs,
};

use crate::world::{Output, Verdict};

/// Number of bytes that are restored. Programs change no others.
const HEADERS: usize = 128;
type Headers = [u64; HEADERS / 8];

pub(crate) struct Restored {
    first: Program,
    program: ProgramFd,
    only_returns: Program,
    /// Array of programs with the one that `first` calls.
    called: ProgramArray<MapData>,
    context: Option<Vec<u8>>,
    /// Packet of the length that all have.
    packet: Vec<u8>,
}

impl Restored {
    /// Loads the programs. All packets have the length of `packet`. `change` makes the headers for
    /// each number below `count`, which must be a power of two.
    pub(crate) fn new(
        program: &Program,
        context: Option<Vec<u8>>,
        packet: &[u8],
        count: u32,
        change: impl Fn(&mut [u8], u32),
    ) -> Result<Self> {
        const ARRAY: u32 = 2;
        const PROGRAM_ARRAY: u32 = 3;
        const RETURN: [u64; 2] = [instruction(0xb7, 0, 0, 0, 0), instruction(0x95, 0, 0, 0, 0)];
        ensure!(count.is_power_of_two(), "{count} packets");
        let make = |kind, value_size: usize, max_entries| {
            let value_size = u32::try_from(value_size)?;
            anyhow::Ok(bpf::create_map(
                &MapInfo { kind, key_size: 4, value_size, max_entries, ..MapInfo::default() },
                None,
            )?)
        };
        let (counter, packets) = (make(ARRAY, 4, 1)?, make(ARRAY, HEADERS, count)?);
        let headers = |number| {
            let mut bytes = packet.to_vec();
            change(&mut bytes, number);
            bytes.resize(HEADERS, 0);
            bpf::pod(&bytes).context("no headers")
        };
        let numbers: Vec<u32> = (0..count).collect();
        let all = numbers.iter().map(|number| headers(*number)).collect::<Result<Vec<Headers>>>()?;
        let map: TypedMap<u32, Headers> = TypedMap::new(packets.as_fd().try_clone_to_owned()?)??;
        map.set_all(&numbers, &all).map_err(|(_, error)| error)?;
        let programs = make(PROGRAM_ARRAY, 4, 1)?;
        let called = ProgramArray::try_from(Map::ProgramArray(MapData::from_id(
            bpf::map_info(programs.as_fd())?.id,
        )?))?;
        let is_xdp = matches!(program, Program::Xdp(_));
        let first = first(is_xdp, [&counter, &packets, &programs], count, packet.len());
        Ok(Self {
            first: load(is_xdp, &first)?,
            program: program.fd()?.try_clone()?,
            only_returns: load(is_xdp, &RETURN)?,
            called,
            context,
            packet: packet.to_vec(),
        })
    }

    /// Returns the mean nanoseconds that the program itself takes for one of `runs` runs. It is the
    /// median of `calls` calls.
    pub(crate) fn nanoseconds(&mut self, calls: u32, runs: u32) -> Result<u64> {
        self.called.set(0, self.only_returns.fd()?, 0)?;
        let without = self.median(calls, runs)?;
        self.called.set(0, &self.program, 0)?;
        Ok(self.median(calls, runs)?.saturating_sub(without))
    }

    fn median(&self, calls: u32, runs: u32) -> Result<u64> {
        let times = (0..calls).map(|_| Ok(u64::try_from(self.call(runs, None)?.duration.as_nanos())?));
        let mut times = times.collect::<Result<Vec<_>>>()?;
        times.sort_unstable();
        times.get(times.len() / 2).copied().context("no call")
    }

    /// Runs the program on the next packet, and returns what becomes of it.
    pub(crate) fn run(&mut self) -> Result<Output> {
        self.called.set(0, &self.program, 0)?;
        let mut packet = vec![0; self.packet.len() + 256];
        let result = self.call(1, Some(&mut packet))?;
        packet.truncate(result.data_size_out as usize);
        let is_xdp = matches!(self.first, Program::Xdp(_));
        let verdict = if is_xdp { Verdict::of_xdp } else { Verdict::of_tc };
        Ok(Output { verdict: verdict(result.return_value)?, packet })
    }

    fn call(&self, repeat: u32, data_out: Option<&mut [u8]>) -> Result<TestRunResult> {
        let options = TestRunOptions {
            data_in: Some(&self.packet),
            data_out,
            ctx_in: self.context.as_deref(),
            repeat,
            ..TestRunOptions::default()
        };
        Ok(if let Program::Xdp(first) = &self.first {
            first.test_run(options)?
        } else {
            <&SchedClassifier>::try_from(&self.first)?.test_run(options)?
        })
    }
}

fn load(is_xdp: bool, instructions: &[u64]) -> Result<Program> {
    const BPFFS: &str = "/sys/fs/bpf";
    const CLASSIFIER: u32 = 3;
    const XDP: u32 = 6;
    let (kind, attached) = if is_xdp { (XDP, BPF_XDP as u32) } else { (CLASSIFIER, 0) };
    let program = bpf::load_program(kind, attached, instructions)?;
    // aya makes programs only of object files and of pins.
    provide_bpffs(BPFFS.as_ref())?;
    let at = PathBuf::from(format!("{BPFFS}/packets-{}", process::id()));
    bpf::pin(program.as_fd(), &at)?;
    let opened = if is_xdp {
        Xdp::from_pin(&at, XdpAttachType::Interface).map(Program::Xdp)
    } else {
        SchedClassifier::from_pin(&at).map(Program::SchedClassifier)
    };
    fs::remove_file(at)?;
    Ok(opened?)
}

const fn instruction(code: u64, to: u64, from: u64, offset: u64, value: i32) -> u64 {
    code | to << 8 | from << 12 | offset << 16 | (value.cast_unsigned() as u64) << 32
}

/// Returns the instructions that restore the packet and call the program.
fn first(is_xdp: bool, maps: [&OwnedFd; 3], count: u32, length: usize) -> Vec<u64> {
    const MAP: u64 = 1;
    const VALUE_OF_MAP: u64 = 2;
    const LOOK_UP: i32 = 1;
    const STORE: i32 = 9;
    const TAIL_CALL: i32 = 12;
    const ADJUST_HEAD: i32 = 44;
    const ADJUST_ROOM: i32 = 50;
    const STORE_BYTES: i32 = 190;
    const BELOW_LINK_HEADER: i32 = 1;
    let copy = |to, from| instruction(0xbf, to, from, 0, 0);
    let set = |to, value| instruction(0xb7, to, 0, 0, value);
    let add = |to, value| instruction(0x07, to, 0, 0, value);
    let load = |to, from, at| instruction(0x61, to, from, at, 0);
    let call = |function| instruction(0x85, 0, 0, 0, function);
    let skip_if = |register, value, distance| instruction(0x15, register, 0, distance, value);
    let skip_unless = |register, value, distance| instruction(0x55, register, 0, distance, value);
    let exit = instruction(0x95, 0, 0, 0, 0);
    let [counter, packets, programs] = maps.map(|map| map.as_raw_fd());
    let map = |to, kind, map| [instruction(0x18, to, kind, 0, map), 0];
    let (mask, length) = (count.cast_signed() - 1, length as i32);
    // The code keeps a key at -4 of the stack, and the headers in r8.
    let mut all = vec![copy(6, 1)];
    all.extend(map(7, VALUE_OF_MAP, counter));
    all.extend([load(1, 7, 0), copy(2, 1), add(2, 1), instruction(0x63, 7, 2, 0, 0)]);
    all.extend([instruction(0x57, 1, 0, 0, mask), instruction(0x63, 10, 1, 0xfffc, 0)]);
    all.extend(map(1, MAP, packets));
    all.extend([copy(2, 10), add(2, -4), call(LOOK_UP), skip_unless(0, 0, 1), exit, copy(8, 0)]);
    if is_xdp {
        // The code computes data_end - data - length.
        all.extend([load(2, 6, 4), load(3, 6, 0), instruction(0x1f, 2, 3, 0, 0), add(2, -length)]);
        all.extend([skip_if(2, 0, 2), copy(1, 6), call(ADJUST_HEAD)]);
    } else {
        // The code computes length - len.
        all.extend([load(2, 6, 0), instruction(0x87, 2, 0, 0, 0), add(2, length), skip_if(2, 0, 4)]);
        all.extend([copy(1, 6), set(3, BELOW_LINK_HEADER), set(4, 0), call(ADJUST_ROOM)]);
    }
    all.extend([copy(1, 6), set(2, 0), copy(3, 8), set(4, length.min(HEADERS as i32)), set(5, 0)]);
    all.extend([call(if is_xdp { STORE_BYTES } else { STORE }), copy(1, 6)]);
    all.extend(map(2, MAP, programs));
    all.extend([set(3, 0), call(TAIL_CALL), set(0, 0), exit]);
    all
}
