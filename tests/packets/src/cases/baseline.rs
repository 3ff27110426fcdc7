//! Stack and verified instructions of the programs, compared with what they took before.
//! `baseline/` has a file for each kernel on which one was written.

use std::{collections::HashMap, fs, io::ErrorKind, ops::Range};

use anyhow::{Context as _, Result, bail, ensure};
use aya::programs::{CgroupSockAddr, Program};
use aya_obj::{Object, generated::bpf_insn};
use scenario::Skip;

use super::{Case, WorldKind};
use crate::world::{World, has_xdp_fragments};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/baseline");
/// Environment variable that makes the case write the baseline instead of comparing.
const WRITE: &str = "WRITE_BASELINE";

/// Most bytes of stack that a program may take with all functions that it calls. The kernel's limit
/// is 512; 96 are kept for later changes.
const STACK_LIMIT: u32 = 416;
/// Most instructions of a program that the verifier may walk through. The kernel's limit is
/// 1,000,000.
const VERIFIED_LIMIT: u32 = 250_000;
/// Step to which kernels before 6.8 round each stack frame up.
const FRAME_STEP: u32 = 32;
/// Change of the verified instructions, in percent, that needs no new baseline.
const TOLERANCE: u32 = 5;

pub(super) fn case() -> Case {
    let name = "what the programs take of stack and verifier".to_owned();
    Case { name, world: WorldKind::HostPackets, run: Box::new(compare) }
}

/// Stack and verified instructions of one program.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Cost {
    stack: u32,
    verified: u32,
}

fn compare(world: &mut World) -> Result<()> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let kernel = release.split('.').take(2).collect::<Vec<_>>().join(".");
    let file = format!("{FOLDER}/{kernel}.txt");
    let measured_with = proxy_ctl::modes::ebpf::OBJECT_BUILT_WITH;
    // Before 5.18, the programs of sockets are loaded with other constants. Before 5.16, the kernel
    // does not count verified instructions.
    if !has_xdp_fragments()? {
        bail!(Skip("stack and verified instructions: from Linux 5.18 on".to_owned()));
    }
    let costs = costs(world)?;
    for (name, cost) in &costs {
        ensure!(cost.stack <= STACK_LIMIT, "{name} takes {} bytes of stack of {STACK_LIMIT}", cost.stack);
        let verified = cost.verified;
        ensure!(verified <= VERIFIED_LIMIT, "{name}: {verified} instructions verified of {VERIFIED_LIMIT}");
    }
    if std::env::var_os(WRITE).is_some() {
        let rows =
            costs.iter().map(|(name, Cost { stack, verified })| format!("{name} {stack} {verified}\n"));
        let text = format!("{measured_with}\n{}", rows.collect::<String>());
        return fs::write(&file, text).with_context(|| format!("writing {file}"));
    }
    let baseline = match fs::read_to_string(&file) {
        Ok(baseline) => baseline,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!(Skip(format!("stack and verified instructions: no baseline of Linux {kernel}")))
        }
        Err(error) => return Err(error).with_context(|| file),
    };
    let mut lines = baseline.lines();
    let known_with = lines.next().with_context(|| format!("{file} is empty"))?;
    let known = lines.map(row).collect::<Result<HashMap<_, _>>>().with_context(|| file.clone())?;
    let gone = known.keys().find(|name| !costs.iter().any(|(program, _)| program == *name));
    ensure!(gone.is_none(), "{file} has {gone:?}, which is no program; {WRITE}=1 writes the new baseline");
    if measured_with != known_with {
        bail!(Skip(format!(
            "stack and verified instructions: known of {known_with}; this is {measured_with}"
        )));
    }
    let mut changes = Vec::new();
    for (name, cost) in &costs {
        let known = *known.get(name.as_str()).unwrap_or(&Cost::default());
        if cost.stack.abs_diff(known.stack) > FRAME_STEP {
            changes.push(format!("{name}: {} bytes of stack, were {}", cost.stack, known.stack));
        }
        if cost.verified.abs_diff(known.verified) * 100 > known.verified * TOLERANCE {
            changes.push(format!("{name}: {} instructions verified, were {}", cost.verified, known.verified));
        }
    }
    if !changes.is_empty() {
        bail!("{}\n{WRITE}=1 with this case alone writes the new baseline", changes.join("\n"));
    }
    Ok(())
}

/// Parses a line `name stack verified`.
fn row(line: &str) -> Result<(&str, Cost)> {
    let [name, stack, verified] = line.split(' ').collect::<Vec<_>>()[..] else {
        bail!("{line:?} is not a program with two numbers")
    };
    Ok((name, Cost { stack: stack.parse()?, verified: verified.parse()? }))
}

/// Returns the cost of every program, sorted by name.
fn costs(world: &mut World) -> Result<Vec<(String, Cost)>> {
    let stacks = stacks()?;
    let mut costs = Vec::new();
    for (name, program) in world.ebpf.programs_mut() {
        if program.fd().is_err() {
            let loaded = if let Program::Xdp(program) = &mut *program {
                program.load()
            } else if let Program::CgroupSock(program) = &mut *program {
                program.load()
            } else {
                <&mut CgroupSockAddr>::try_from(&mut *program).and_then(CgroupSockAddr::load)
            };
            loaded.with_context(|| format!("loading {name}"))?;
        }
        let info = program.info().with_context(|| format!("asking for {name}"))?;
        let stack = *stacks.get(name).with_context(|| format!("no program {name} in the object"))?;
        costs.push((
            name.to_owned(),
            Cost { stack, verified: info.verified_instruction_count().unwrap_or(0) },
        ));
    }
    costs.sort_unstable_by(|one, other| one.0.cmp(&other.0));
    Ok(costs)
}

/// Returns each program's stack, including the functions that it calls.
fn stacks() -> Result<HashMap<String, u32>> {
    let bytes = crate::object()?;
    let mut object = Object::parse(&bytes)?;
    let sections = object.functions.keys().map(|(section, _)| *section).collect();
    // The kernel gets each program with all functions that it calls behind it.
    object.relocate_calls(&sections)?;
    let programs = object.programs.iter().map(|(name, program)| {
        let function = object.functions.get(&program.function_key()).context("a program without code")?;
        Ok((name.clone(), Code::of(&function.instructions).deepest(0)))
    });
    programs.collect()
}

/// Instructions of a program, cut into its functions.
struct Code<'a> {
    instructions: &'a [bpf_insn],
    /// Indices at which the functions begin, in order.
    begins: Vec<usize>,
}

impl<'a> Code<'a> {
    fn of(instructions: &'a [bpf_insn]) -> Self {
        let calls = (0..instructions.len()).filter_map(|at| callee(instructions, at));
        let mut begins: Vec<_> = calls.chain([0]).collect();
        begins.sort_unstable();
        begins.dedup();
        Self { instructions, begins }
    }

    fn body(&self, begin: usize) -> Range<usize> {
        let next = self.begins.iter().find(|other| **other > begin);
        begin..*next.unwrap_or(&self.instructions.len())
    }

    /// Returns the stack of the function that begins at `begin` and of the deepest chain of calls
    /// below it.
    fn deepest(&self, begin: usize) -> u32 {
        let body = self.body(begin);
        let frame = body.clone().filter_map(|at| self.reach(at)).max().unwrap_or(0);
        let called = body.filter_map(|at| callee(self.instructions, at)).map(|begin| self.deepest(begin));
        frame.max(1).next_multiple_of(FRAME_STEP) + called.max().unwrap_or(0)
    }

    /// Returns how far down its frame an instruction reaches, by an access or by
    /// `rX = r10; rX += -n`.
    fn reach(&self, at: usize) -> Option<u32> {
        const FRAME: u8 = 10;
        const LOAD: u8 = 1;
        const STORE: u8 = 2;
        const STORE_REGISTER: u8 = 3;
        const COPY: u8 = 0xbf;
        const ADD: u8 = 0x07;
        let instruction = &self.instructions[at];
        let down = match instruction.code & 7 {
            LOAD if instruction.src_reg() == FRAME => instruction.off.into(),
            STORE | STORE_REGISTER if instruction.dst_reg() == FRAME => instruction.off.into(),
            _ if instruction.code == COPY && instruction.src_reg() == FRAME => {
                let next = self.instructions.get(at + 1)?;
                (next.code == ADD && next.dst_reg() == instruction.dst_reg()).then_some(next.imm)?
            }
            _ => return None,
        };
        (down < 0).then_some(down.unsigned_abs())
    }
}

/// Returns the index at which the function begins that the instruction at `at` calls.
fn callee(instructions: &[bpf_insn], at: usize) -> Option<usize> {
    const CALL: u8 = 0x85;
    const OF_OWN: u8 = 1;
    let instruction = &instructions[at];
    let is_call = instruction.code == CALL && instruction.src_reg() == OF_OWN;
    is_call.then(|| (at + 1).checked_add_signed(instruction.imm as isize)).flatten()
}
