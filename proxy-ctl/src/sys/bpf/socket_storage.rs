//! The values that BPF programs have stored with sockets. sock_diag can list them only for TCP.

use std::{
    fs::File,
    io::{self, Read as _},
    marker::PhantomData,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd, RawFd},
};

use aya::Pod;

use super::kernel_types::KernelTypes;
use crate::sys::{
    CallError, bpf,
    net::{netlink::word, socket_diag::Transport},
};

/// A socket that has a value.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct StoredSocket<T> {
    /// The cookie of the socket. 0 means that the socket has none yet.
    pub cookie: u64,
    /// The inode of its network namespace.
    pub namespace: u32,
    /// IANA's number of its protocol.
    pub protocol: u32,
    pub value: T,
}

/// The length of the header before each value, in bytes.
const HEADER: usize = 16;

/// A reader of socket storage maps with values of this type, for all network namespaces at once.
/// Needs Linux 5.9, CAP_BPF and CAP_PERFMON.
///
/// `EPERM` in spite of these capabilities means that a locked-down kernel refuses iterators over
/// maps. Such a kernel may still allow [`SocketIterators`].
#[derive(Debug)]
pub struct StorageReader<T> {
    program: OwnedFd,
    types: PhantomData<fn() -> T>,
}

impl<T: Pod> StorageReader<T> {
    pub fn load(types: &KernelTypes) -> Result<Self, CallError> {
        let find = || Ok((Offsets::find(types)?, types.function("bpf_iter_bpf_sk_storage_map")?));
        let (offsets, function) = find().map_err(CallError::of("reading the kernel's types"))?;
        let program = bpf::load_iterator(function, &offsets.program(&Visited::Value, size_of::<T>()))?;
        Ok(Self { program, types: PhantomData })
    }

    /// Returns every socket that has a value in `map`, which must be a socket storage with values
    /// of this type.
    pub fn read(&self, map: BorrowedFd<'_>) -> Result<Vec<StoredSocket<T>>, CallError> {
        check::<T>(map)?;
        read(bpf::link_iterator(self.program.as_fd(), Some(map))?.as_fd())
    }
}

/// The kernel's iterators over the sockets of a network namespace.
#[derive(Debug)]
pub struct SocketIterators {
    offsets: Offsets,
    tcp: u32,
    udp: u32,
}

impl SocketIterators {
    /// Finds the iterators. Returns `EPERM` if the kernel refuses these too.
    pub fn open(types: &KernelTypes) -> Result<Self, CallError> {
        const RETURN_0: [u64; 2] = [0xb7, 0x95];
        let find = || {
            let offsets = Offsets::find(types)?;
            Ok(Self { offsets, tcp: types.function("bpf_iter_tcp")?, udp: types.function("bpf_iter_udp")? })
        };
        let found = find().map_err(CallError::of("reading the kernel's types"))?;
        bpf::load_iterator(found.udp, &RETURN_0)?;
        Ok(found)
    }

    /// Prepares reading `map` for sockets of these transports. `map` must be a socket storage with
    /// values of this type. Needs Linux 5.11, CAP_BPF and CAP_PERFMON.
    pub fn storage<T: Pod>(
        &self,
        map: BorrowedFd<'_>,
        transports: &[Transport],
    ) -> Result<NamespaceStorage<T>, CallError> {
        check::<T>(map)?;
        let link = |transport: &Transport| {
            let visited = Visited::Socket { map: map.as_raw_fd(), protocol: transport.number() };
            let function = match transport {
                Transport::Tcp => self.tcp,
                Transport::Udp => self.udp,
            };
            let program = bpf::load_iterator(function, &self.offsets.program(&visited, size_of::<T>()))?;
            bpf::link_iterator(program.as_fd(), None)
        };
        let links = transports.iter().map(link).collect::<Result<_, _>>()?;
        Ok(NamespaceStorage { links, types: PhantomData })
    }
}

/// A socket storage map that is read for one network namespace after the other.
#[derive(Debug)]
pub struct NamespaceStorage<T> {
    links: Vec<OwnedFd>,
    types: PhantomData<fn() -> T>,
}

impl<T: Pod> NamespaceStorage<T> {
    /// Returns, by transport, the sockets of this thread's network namespace that have a value.
    pub fn read(&self) -> impl Iterator<Item = Result<Vec<StoredSocket<T>>, CallError>> {
        self.links.iter().map(|link| read(link.as_fd()))
    }
}

/// Returns why socket storage cannot be read for all network namespaces at once, or `None` if it
/// can.
pub fn obstacle() -> Option<String> {
    let types = KernelTypes::read().map_err(CallError::of("reading the kernel's types"));
    let loaded = types.and_then(|types| StorageReader::<u64>::load(&types));
    loaded.err().map(|error| format!("the kernel does not let socket storage be read at once: {error}"))
}

fn check<T>(map: BorrowedFd<'_>) -> Result<(), CallError> {
    let found = bpf::map_info(map)?.value_size;
    if found as usize == size_of::<T>() {
        return Ok(());
    }
    let problem = format!("values have {found} bytes, not {}", size_of::<T>());
    Err(CallError::new("reading socket storage", io::Error::other(problem)))
}

fn read<T: Pod>(link: BorrowedFd<'_>) -> Result<Vec<StoredSocket<T>>, CallError> {
    /// The number of bytes that one read asks for: the size of the kernel's own buffer. After a
    /// smaller read, some iterators would find their position in a hash bucket by counting, and
    /// miss elements if others were removed meanwhile.
    const AT_ONCE: usize = 32 << 10;
    let (mut file, mut bytes, mut buffer) = (File::from(bpf::iterator(link)?), Vec::new(), vec![0; AT_ONCE]);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => bytes.extend_from_slice(&buffer[..length]),
            // The iterator has visited a million sockets without a value.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(CallError::new("reading socket storage", error)),
        }
    }
    Ok(bytes.chunks_exact(HEADER + size_of::<T>()).filter_map(parse).collect())
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

/// The objects that an iterator visits.
enum Visited {
    /// The values of a map, with their sockets.
    Value,
    /// The sockets of this protocol, whose values in `map` are looked up.
    Socket { map: RawFd, protocol: u8 },
}

/// The offsets of the kernel's fields that a record is made of.
#[derive(Debug)]
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

    /// Returns an iterator program that writes a record, header and value, for each socket that has
    /// a value.
    fn program(&self, visited: &Visited, value: usize) -> Vec<u64> {
        const SEQ_WRITE: u64 = 127;
        const SK_STORAGE_GET: u64 = 107;
        const HEADER_AT: i16 = -(HEADER as i16);
        const WORD: u64 = 0x61;
        const DOUBLE: u64 = 0x79;
        const HALF: u64 = 0x69;
        const LEAVE_IF_ZERO: u64 = 0x15;
        let load = |size: u64, to: u64, from: u64, at: u16| size | to << 8 | from << 12 | u64::from(at) << 16;
        let store =
            |size: u64, from: u64, at: i16| size | 10 << 8 | from << 12 | u64::from(at.cast_unsigned()) << 16;
        let copy = |to: u64, from: u64| 0xbf | to << 8 | from << 12;
        let set = |to: u64, value: u64| 0xb7 | to << 8 | value << 32;
        let leave_if_zero = |register: u64| LEAVE_IF_ZERO | register << 8;
        let call = |helper: u64| 0x85 | helper << 32;
        let mut program = vec![copy(6, 1)];
        // These load the socket into r7, its value into r8 and its protocol into r9. Pointers are
        // null at the end of the list.
        match visited {
            Visited::Value => program.extend([
                load(DOUBLE, 7, 6, 16),
                leave_if_zero(7),
                load(DOUBLE, 8, 6, 24),
                leave_if_zero(8),
                load(HALF, 9, 7, self.protocol),
            ]),
            Visited::Socket { map, protocol } => program.extend([
                load(DOUBLE, 7, 6, 8),
                leave_if_zero(7),
                0x18 | 1 << 8 | 1 << 12 | u64::from(map.cast_unsigned()) << 32,
                0,
                copy(2, 7),
                set(3, 0),
                set(4, 0),
                call(SK_STORAGE_GET),
                leave_if_zero(0),
                copy(8, 0),
                set(9, u64::from(*protocol)),
            ]),
        }
        program.extend([
            store(0x63, 9, HEADER_AT + 12),
            load(DOUBLE, 1, 7, self.cookie),
            store(0x7b, 1, HEADER_AT),
            load(DOUBLE, 1, 7, self.net),
            load(WORD, 1, 1, self.inode),
            store(0x63, 1, HEADER_AT + 8),
            // This loads meta.seq.
            load(DOUBLE, 1, 6, 0),
            load(DOUBLE, 9, 1, 0),
            copy(1, 9),
            copy(2, 10),
            0x07 | 2 << 8 | u64::from((i32::from(HEADER_AT)).cast_unsigned()) << 32,
            set(3, HEADER as u64),
            call(SEQ_WRITE),
            copy(1, 9),
            copy(2, 8),
            set(3, value as u64),
            call(SEQ_WRITE),
            set(0, 0),
            0x95,
        ]);
        let leave = program.len() - 2;
        for (at, instruction) in program.iter_mut().enumerate() {
            if *instruction & 0xff == LEAVE_IF_ZERO {
                // The offset of a jump counts from the next instruction.
                *instruction |= ((leave - at - 1) as u64) << 16;
            }
        }
        program
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
