//! The size of the machine.

use std::{fs, io, num::NonZero, thread};

/// The processors and the memory of the machine.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Machine {
    /// The number of online processors, including those that this process may not use.
    pub cores: u32,
    /// The size of the memory in bytes.
    pub memory: u64,
}

impl Machine {
    /// Reads the size of the machine. Fails if /proc is not that of a Linux kernel.
    pub fn read() -> io::Result<Self> {
        let meminfo = fs::read_to_string("/proc/meminfo")?;
        let memory = memory(&meminfo).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "/proc/meminfo has no line MemTotal in kB")
        })?;
        // If the list of online processors cannot be read, only those that this process may use are
        // known.
        let usable = || thread::available_parallelism().map_or(1, NonZero::get);
        let cores = aya::util::online_cpus().map_or_else(|_| usable(), |cores| cores.len());
        Ok(Self { cores: u32::try_from(cores).unwrap_or(u32::MAX), memory })
    }
}

fn memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1_024)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::usual("MemTotal:       16303940 kB\nMemFree:         100 kB\n", Some(16_303_940 * 1_024))]
    #[case::without_the_line("MemFree: 100 kB\n", None)]
    #[case::of_another_unit("MemTotal: 100 MB\n", None)]
    #[case::too_large("MemTotal: 18446744073709551615 kB\n", None)]
    fn memory_of_a_machine(#[case] meminfo: &str, #[case] expected: Option<u64>) {
        assert_eq!(memory(meminfo), expected);
    }

    #[test]
    fn this_machine_has_a_size() {
        let machine = Machine::read().unwrap();
        assert!(machine.cores > 0 && machine.memory > 1 << 20, "{machine:?}");
    }
}
