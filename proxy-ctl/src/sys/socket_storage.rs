//! What BPF programs have stored with sockets, read for all sockets of all network namespaces: sock_diag tells it of TCP alone.

use std::{
    fs::File,
    io::{self, Read as _},
    marker::PhantomData,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use aya::Pod;

use super::{CallError, bpf, kernel_types::KernelTypes, netlink::word};

/// A socket that has a value.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct StoredSocket<T> {
    /// 0: none was given to it yet.
    pub cookie: u64,
    /// Inode of its network namespace.
    pub namespace: u32,
    /// IANA number.
    pub protocol: u32,
    pub value: T,
}

/// What precedes each value.
const HEADER: usize = 16;

/// A program that reads maps of values of this type. Linux 5.9; needs CAP_BPF and CAP_PERFMON.
#[derive(Debug)]
pub struct StorageReader<T> {
    program: OwnedFd,
    types: PhantomData<fn() -> T>,
}

impl<T: Pod> StorageReader<T> {
    pub fn load(types: &KernelTypes) -> Result<Self, CallError> {
        let instructions = Offsets::find(types).map_err(CallError::of("reading the kernel's types"))?;
        let function = types
            .function("bpf_iter_bpf_sk_storage_map")
            .map_err(CallError::of("reading the kernel's types"))?;
        let program = bpf::load_iterator(function, &instructions.program(size_of::<T>()))?;
        Ok(Self { program, types: PhantomData })
    }

    /// Every socket that has a value in `map`, which must be a socket storage of values of this type.
    pub fn read(&self, map: BorrowedFd<'_>) -> Result<Vec<StoredSocket<T>>, CallError> {
        let found = bpf::map_info(map)?.value_size;
        if found as usize != size_of::<T>() {
            let problem = format!("values have {found} bytes, not {}", size_of::<T>());
            return Err(CallError::new("reading socket storage", io::Error::other(problem)));
        }
        let link = bpf::link_map_iterator(self.program.as_fd(), map)?;
        let mut bytes = Vec::new();
        File::from(bpf::iterator(link.as_fd())?)
            .read_to_end(&mut bytes)
            .map_err(CallError::of("reading socket storage"))?;
        Ok(bytes.chunks_exact(HEADER + size_of::<T>()).filter_map(parse).collect())
    }
}

/// Why socket storage cannot be read, where it cannot: kernels that are locked down may refuse such a program with `EPERM`.
pub fn obstacle() -> Option<String> {
    let types = KernelTypes::read().map_err(CallError::of("reading the kernel's types"));
    let loaded = types.and_then(|types| StorageReader::<u64>::load(&types));
    loaded.err().map(|error| format!("the kernel does not let socket storage be read: {error}"))
}

fn parse<T: Pod>(record: &[u8]) -> Option<StoredSocket<T>> {
    let (header, value) = record.split_at_checked(HEADER)?;
    let (low, high) = (word(header, 0)?, word(header, 4)?);
    Some(StoredSocket {
        cookie: u64::from(low) | u64::from(high) << 32,
        namespace: word(header, 8)?,
        protocol: word(header, 12)?,
        value: bpf::pod(value)?,
    })
}

/// Where the kernel has what a record says of its socket.
struct Offsets {
    cookie: u16,
    net: u16,
    protocol: u16,
    inode: u16,
}

impl Offsets {
    fn find(types: &KernelTypes) -> io::Result<Self> {
        Ok(Self {
            cookie: types.offset("sock_common", "skc_cookie")?,
            net: types.offset("sock_common", "skc_net")?,
            protocol: types.offset("sock", "sk_protocol")?,
            inode: types.offset("net", "ns")?.saturating_add(types.offset("ns_common", "inum")?),
        })
    }

    /// Writes a record for each socket: header and value.
    fn program(&self, value: usize) -> [u64; 25] {
        const SEQ_WRITE: u64 = 127;
        const HEADER_AT: i16 = -(HEADER as i16);
        const WORD: u64 = 0x61;
        const DOUBLE: u64 = 0x79;
        const HALF: u64 = 0x69;
        let load = |size: u64, to: u64, from: u64, at: u16| size | to << 8 | from << 12 | u64::from(at) << 16;
        let store =
            |size: u64, from: u64, at: i16| size | 10 << 8 | from << 12 | u64::from(at.cast_unsigned()) << 16;
        let copy = |to: u64, from: u64| 0xbf | to << 8 | from << 12;
        let set = |to: u64, value: u64| 0xb7 | to << 8 | value << 32;
        // To the end of the program, counted from the next instruction.
        let leave_if_zero = |register: u64, distance: u64| 0x15 | register << 8 | distance << 16;
        let call = 0x85 | SEQ_WRITE << 32;
        [
            copy(6, 1),
            // The socket and its value; both are null at the end of the list.
            load(DOUBLE, 7, 6, 16),
            leave_if_zero(7, 20),
            load(DOUBLE, 8, 6, 24),
            leave_if_zero(8, 18),
            load(DOUBLE, 1, 7, self.cookie),
            store(0x7b, 1, HEADER_AT),
            load(DOUBLE, 1, 7, self.net),
            load(WORD, 1, 1, self.inode),
            store(0x63, 1, HEADER_AT + 8),
            load(HALF, 1, 7, self.protocol),
            store(0x63, 1, HEADER_AT + 12),
            // meta.seq
            load(DOUBLE, 1, 6, 0),
            load(DOUBLE, 9, 1, 0),
            copy(1, 9),
            copy(2, 10),
            0x07 | 2 << 8 | u64::from((i32::from(HEADER_AT)).cast_unsigned()) << 32,
            set(3, HEADER as u64),
            call,
            copy(1, 9),
            copy(2, 8),
            set(3, value as u64),
            call,
            set(0, 0),
            0x95,
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_whole_or_not_at_all() {
        let record: Vec<u8> = [1_u32, 2, 3, 17, 5].iter().flat_map(|word| word.to_ne_bytes()).collect();
        let socket = StoredSocket { cookie: 1 | 2 << 32, namespace: 3, protocol: 17, value: 5_u32 };
        assert_eq!(parse(&record), Some(socket));
        assert!((0..record.len()).all(|length| parse::<u32>(&record[..length]).is_none()));
    }
}
