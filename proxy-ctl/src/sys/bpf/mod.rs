//! `bpf(2)`: pins, links, iterators, and what the kernel reports about maps and links.

pub mod grace;
pub mod kernel_types;
pub mod map;
pub mod mmap;
pub mod socket_storage;

use std::{
    cell::Cell,
    ffi::CString,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use aya::Pod;
use aya_obj::generated::{bpf_attach_type, bpf_cmd};

use super::CallError;

thread_local! {
    static WRITING_CALLS: Cell<u64> = const { Cell::new(0) };
}

/// Returns how many calls of bpf(2) this thread has made to write maps, failed ones included.
/// Writes to a map that is mapped into memory need no call and are not counted.
pub fn writing_calls() -> u64 {
    WRITING_CALLS.get()
}

const fn writes(command: bpf_cmd) -> bool {
    matches!(
        command,
        bpf_cmd::BPF_MAP_UPDATE_ELEM
            | bpf_cmd::BPF_MAP_UPDATE_BATCH
            | bpf_cmd::BPF_MAP_DELETE_ELEM
            | bpf_cmd::BPF_MAP_LOOKUP_AND_DELETE_ELEM
    )
}

/// Calls `bpf(2)` and returns its result, which is not negative.
///
/// # Safety
///
/// `attr` is a prefix of the kernel's `union bpf_attr` for `command`. Every address in it is valid
/// for what the command does with it.
pub(super) unsafe fn call<A>(command: bpf_cmd, attr: &mut A) -> io::Result<libc::c_long> {
    if writes(command) {
        WRITING_CALLS.set(WRITING_CALLS.get() + 1);
    }
    let attr: *mut A = attr;
    // SAFETY: the caller vouches for `attr`; the kernel reads and writes no more than the length
    // given.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command as libc::c_long, attr, size_of::<A>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Makes a call as [`call`] does, for a command whose result is a new descriptor.
///
/// # Safety
///
/// The conditions of [`call`] apply.
unsafe fn open<A>(command: bpf_cmd, name: &'static str, attr: &mut A) -> Result<OwnedFd, CallError> {
    // SAFETY: the caller vouches for `attr`.
    let raw = unsafe { call(command, attr) }.map_err(|e| CallError::new(name, e))?;
    let raw = i32::try_from(raw)
        .map_err(|_| CallError::new(name, io::Error::other("the kernel returned no descriptor")))?;
    // SAFETY: the kernel has opened `raw` for this call alone; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Returns a descriptor in the form that the attributes of `bpf(2)` have. Descriptors are never
/// negative.
pub(super) fn number(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().unsigned_abs()
}

/// Returns an address in the form that the attributes of `bpf(2)` have.
pub(super) fn address<T>(target: *const T) -> u64 {
    target.expose_provenance() as u64
}

#[repr(C)]
struct Pin {
    pathname: u64,
    fd: u32,
    flags: u32,
}

fn c_path(path: &Path, call: &'static str) -> Result<CString, CallError> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| {
        CallError::new(call, io::Error::new(io::ErrorKind::InvalidInput, "path with a NUL byte"))
    })
}

/// Pins a map, program or link at `path` on a bpffs.
pub fn pin(fd: BorrowedFd<'_>, path: &Path) -> Result<(), CallError> {
    const CALL: &str = "bpf(BPF_OBJ_PIN)";
    let path = c_path(path, CALL)?;
    let mut attr = Pin { pathname: address(path.as_ptr()), fd: number(fd), flags: 0 };
    // SAFETY: BPF_OBJ_PIN reads a NUL-terminated path, which `path` keeps alive.
    unsafe { call(bpf_cmd::BPF_OBJ_PIN, &mut attr) }.map_err(|e| CallError::new(CALL, e))?;
    Ok(())
}

/// Opens the object that is pinned at `path`.
pub fn pinned(path: &Path) -> Result<OwnedFd, CallError> {
    const CALL: &str = "bpf(BPF_OBJ_GET)";
    let path = c_path(path, CALL)?;
    let mut attr = Pin { pathname: address(path.as_ptr()), fd: 0, flags: 0 };
    // SAFETY: BPF_OBJ_GET reads a NUL-terminated path, which `path` keeps alive.
    unsafe { open(bpf_cmd::BPF_OBJ_GET, CALL, &mut attr) }
}

#[repr(C)]
struct Info {
    fd: u32,
    length: u32,
    info: u64,
}

/// Fills `into`, a prefix of the kernel's info struct for this kind of object.
///
/// # Safety
///
/// Any bytes are a valid `T`, and `T` has the kernel's layout.
unsafe fn info<T>(fd: BorrowedFd<'_>, into: &mut T) -> Result<(), CallError> {
    let target: *mut T = into;
    let mut attr = Info { fd: number(fd), length: size_of::<T>() as u32, info: address(target.cast_const()) };
    // SAFETY: the kernel writes at most `length` bytes to `target`, which the caller vouches for.
    unsafe { call(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, &mut attr) }
        .map_err(|e| CallError::new("bpf(BPF_OBJ_GET_INFO_BY_FD)", e))?;
    Ok(())
}

/// The shape of a map: the beginning of `struct bpf_map_info`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct MapInfo {
    /// The type of the map, from `enum bpf_map_type`.
    pub kind: u32,
    pub id: u32,
    /// The length of a key in bytes.
    pub key_size: u32,
    /// The length of a value in bytes.
    pub value_size: u32,
    pub max_entries: u32,
    /// The map's flags, `BPF_F_*`.
    pub flags: u32,
}

pub fn map_info(map: BorrowedFd<'_>) -> Result<MapInfo, CallError> {
    let mut found = MapInfo::default();
    // SAFETY: `MapInfo` is integers only, in the order of `struct bpf_map_info`.
    unsafe { info(map, &mut found) }?;
    Ok(found)
}

/// The beginning of `struct bpf_prog_info`: type and id.
#[derive(Default)]
#[repr(C)]
struct ProgramInfo {
    _kind: u32,
    id: u32,
}

/// The kernel's id of a program.
pub fn program_id(program: BorrowedFd<'_>) -> Result<u32, CallError> {
    let mut found = ProgramInfo::default();
    // SAFETY: `ProgramInfo` is integers only, in the order of `struct bpf_prog_info`.
    unsafe { info(program, &mut found) }?;
    Ok(found.id)
}

/// The beginning of `struct bpf_link_info`.
#[derive(Clone, Copy, Default)]
#[repr(C, align(8))]
struct RawLinkInfo {
    kind: u32,
    id: u32,
    program: u32,
    _padding: u32,
    target: [u32; 4],
}

/// The program that a link attaches, and the target that it is attached to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LinkInfo {
    /// The id of the attached program.
    pub program: u32,
    pub target: LinkTarget,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum LinkTarget {
    /// The inode number of the cgroup. 0 means that the cgroup is gone.
    Cgroup(u64),
    /// The index of the interface. 0 means that the interface is gone.
    Tcx(u32),
    /// The index of the interface. 0 means that the interface is gone.
    Xdp(u32),
    /// Another kind of link, from `enum bpf_link_type`, which this program never makes.
    Other(u32),
}

const LINK_CGROUP: u32 = 3;
const LINK_XDP: u32 = 6;
const LINK_TCX: u32 = 11;

pub fn link_info(link: BorrowedFd<'_>) -> Result<LinkInfo, CallError> {
    let mut found = RawLinkInfo::default();
    // SAFETY: `RawLinkInfo` is integers only, in the order of `struct bpf_link_info`.
    unsafe { info(link, &mut found) }?;
    let [low, high, ..] = found.target;
    let target = match found.kind {
        // The kernel writes a u64 in the machine's byte order. The BPF object is little-endian, and
        // so are the machines that load it.
        LINK_CGROUP => LinkTarget::Cgroup(u64::from(low) | u64::from(high) << 32),
        LINK_TCX => LinkTarget::Tcx(low),
        LINK_XDP => LinkTarget::Xdp(low),
        other => LinkTarget::Other(other),
    };
    Ok(LinkInfo { program: found.program, target })
}

#[derive(Default)]
#[repr(C)]
struct LinkCreate {
    program: u32,
    target: u32,
    attach_type: u32,
    flags: u32,
    relative: u32,
    _padding: u32,
    expected_revision: u64,
}

/// The [`CallError::call`] of an error in making a link.
pub const LINK_CREATE: &str = "bpf(BPF_LINK_CREATE)";

fn create_link(
    program: BorrowedFd<'_>,
    target: u32,
    hook: bpf_attach_type,
    flags: u32,
) -> Result<OwnedFd, CallError> {
    let (program, attach_type) = (number(program), hook as u32);
    let mut attr = LinkCreate { program, target, attach_type, flags, ..LinkCreate::default() };
    // SAFETY: the attributes of BPF_LINK_CREATE for cgroups, tcx and XDP hold no addresses.
    unsafe { open(bpf_cmd::BPF_LINK_CREATE, LINK_CREATE, &mut attr) }
}

/// Attaches `program` to a cgroup, after the programs that are there. Needs Linux 5.7.
pub fn link_cgroup(
    program: BorrowedFd<'_>,
    cgroup: BorrowedFd<'_>,
    hook: bpf_attach_type,
) -> Result<OwnedFd, CallError> {
    create_link(program, number(cgroup), hook, 0)
}

const BPF_F_BEFORE: u32 = 1 << 3;

/// Attaches `program` to an interface by tcx, before all other programs. Needs Linux 6.6; older
/// kernels return `EINVAL`.
pub fn link_tcx(
    program: BorrowedFd<'_>,
    interface: u32,
    hook: bpf_attach_type,
) -> Result<OwnedFd, CallError> {
    create_link(program, interface, hook, BPF_F_BEFORE)
}

/// The largest number of programs that a tcx hook can have (`BPF_MPROG_MAX`).
const MOST_TCX: usize = 64;

#[derive(Default)]
#[repr(C)]
struct ProgramQuery {
    target: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    ids: u64,
    count: u32,
    _padding: u32,
    attach_flags_of_programs: u64,
    link_ids: u64,
    attach_flags_of_links: u64,
    revision: u64,
}

/// Returns the ids of the programs of a tcx hook in the order in which they run. Needs Linux 6.6;
/// older kernels return `EINVAL`.
pub fn tcx_programs(interface: u32, hook: bpf_attach_type) -> Result<Vec<u32>, CallError> {
    let mut ids = vec![0_u32; MOST_TCX];
    let mut attr = ProgramQuery {
        target: interface,
        attach_type: hook as u32,
        ids: address(ids.as_mut_ptr()),
        count: MOST_TCX as u32,
        ..ProgramQuery::default()
    };
    // SAFETY: BPF_PROG_QUERY writes no more than `count` numbers to `ids`, which outlives the call.
    unsafe { call(bpf_cmd::BPF_PROG_QUERY, &mut attr) }
        .map_err(|e| CallError::new("bpf(BPF_PROG_QUERY)", e))?;
    ids.truncate(attr.count as usize);
    Ok(ids)
}

/// The layer in which an XDP program runs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum XdpMode {
    /// The driver runs it.
    Native,
    /// The network stack runs it before anything else. Every device supports that.
    Generic,
}

impl XdpMode {
    /// `XDP_FLAGS_DRV_MODE` or `XDP_FLAGS_SKB_MODE`.
    pub(super) const fn flag(self) -> u32 {
        match self {
            Self::Native => 1 << 2,
            Self::Generic => 1 << 1,
        }
    }
}

/// Attaches `program` to an interface before its stack. Needs Linux 5.9. Returns `EOPNOTSUPP` if
/// the driver has no XDP, and `EBUSY` or `EEXIST` if another program is attached, or one in another
/// mode.
pub fn link_xdp(program: BorrowedFd<'_>, interface: u32, mode: XdpMode) -> Result<OwnedFd, CallError> {
    create_link(program, interface, bpf_attach_type::BPF_XDP, mode.flag())
}

#[repr(C)]
struct IteratorLinkCreate {
    program: u32,
    target: u32,
    attach_type: u32,
    flags: u32,
    info: u64,
    info_length: u32,
    _padding: u32,
}

/// Attaches an iterator to the elements of `map`. Without a map, it visits the objects in the
/// network namespace of the thread that reads it. Needs Linux 5.9.
pub fn link_iterator(program: BorrowedFd<'_>, map: Option<BorrowedFd<'_>>) -> Result<OwnedFd, CallError> {
    let map = map.map(number);
    let info: *const u32 = map.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let mut attr = IteratorLinkCreate {
        program: number(program),
        target: 0,
        attach_type: bpf_attach_type::BPF_TRACE_ITER as u32,
        flags: 0,
        info: address(info),
        info_length: if map.is_some() { size_of::<u32>() as u32 } else { 0 },
        _padding: 0,
    };
    // SAFETY: the kernel reads `info_length` bytes, which `map` keeps alive.
    unsafe { open(bpf_cmd::BPF_LINK_CREATE, LINK_CREATE, &mut attr) }
}

#[repr(C)]
struct IteratorCreate {
    link: u32,
    flags: u32,
}

/// Returns a descriptor from which the output of an iterator is read like a file, from its
/// beginning. Needs Linux 5.8.
pub fn iterator(link: BorrowedFd<'_>) -> Result<OwnedFd, CallError> {
    let mut attr = IteratorCreate { link: number(link), flags: 0 };
    // SAFETY: the attributes of BPF_ITER_CREATE hold no addresses.
    unsafe { open(bpf_cmd::BPF_ITER_CREATE, "bpf(BPF_ITER_CREATE)", &mut attr) }
}

/// Returns a copy of the beginning of `bytes` as a `T`. Returns `None` if there are too few bytes.
pub fn pod<T: Pod>(bytes: &[u8]) -> Option<T> {
    if bytes.len() < size_of::<T>() {
        return None;
    }
    // SAFETY: there are as many bytes, and any pattern is a valid `T`.
    Some(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

#[repr(C)]
struct LinkUpdate {
    link: u32,
    program: u32,
    flags: u32,
    old_program: u32,
}

/// Replaces the link's program by `program` in one step. Returns `ENOLINK` if the object that it
/// was attached to is gone.
pub fn link_update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> Result<(), CallError> {
    let mut attr = LinkUpdate { link: number(link), program: number(program), flags: 0, old_program: 0 };
    // SAFETY: the attributes of BPF_LINK_UPDATE hold no addresses.
    unsafe { call(bpf_cmd::BPF_LINK_UPDATE, &mut attr) }
        .map_err(|e| CallError::new("bpf(BPF_LINK_UPDATE)", e))?;
    Ok(())
}

#[repr(C)]
struct LinkDetach {
    link: u32,
}

/// Detaches the link at once. Needs Linux 5.9. Closing the last descriptor or pin would leave that
/// to a kernel thread.
pub fn link_detach(link: BorrowedFd<'_>) -> Result<(), CallError> {
    let mut attr = LinkDetach { link: number(link) };
    // SAFETY: the attributes of BPF_LINK_DETACH hold no addresses.
    unsafe { call(bpf_cmd::BPF_LINK_DETACH, &mut attr) }
        .map_err(|e| CallError::new("bpf(BPF_LINK_DETACH)", e))?;
    Ok(())
}

#[repr(C)]
struct MapCreate {
    kind: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    inner: u32,
}

/// Makes a map without BTF. `inner` is the template for the elements of a map of maps.
pub fn create_map(shape: &MapInfo, inner: Option<BorrowedFd<'_>>) -> Result<OwnedFd, CallError> {
    let mut attr = MapCreate {
        kind: shape.kind,
        key_size: shape.key_size,
        value_size: shape.value_size,
        max_entries: shape.max_entries,
        flags: shape.flags,
        inner: inner.map_or(0, |fd| number(fd.as_fd())),
    };
    // SAFETY: these attributes of BPF_MAP_CREATE hold no addresses.
    unsafe { open(bpf_cmd::BPF_MAP_CREATE, "bpf(BPF_MAP_CREATE)", &mut attr) }
}

#[derive(Default)]
#[repr(C)]
struct ProgramLoad {
    kind: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    expected_attach_type: u32,
    types: u32,
    function_size: u32,
    functions: u64,
    function_count: u32,
    line_size: u32,
    lines: u64,
    line_count: u32,
    attach_type_id: u32,
}

/// Loads a program that is given as instructions. The verifier decides whether they may run.
pub fn load_program(
    kind: u32,
    expected_attach_type: u32,
    instructions: &[u64],
) -> Result<OwnedFd, CallError> {
    load(kind, expected_attach_type, 0, instructions)
}

/// Loads an iterator program, which runs for each object that `function` is called for. `function`
/// is an id of the kernel's BTF types. Needs Linux 5.8.
pub fn load_iterator(function: u32, instructions: &[u64]) -> Result<OwnedFd, CallError> {
    const TRACING: u32 = 26;
    load(TRACING, bpf_attach_type::BPF_TRACE_ITER as u32, function, instructions)
}

fn load(
    kind: u32,
    expected_attach_type: u32,
    attach_type_id: u32,
    instructions: &[u64],
) -> Result<OwnedFd, CallError> {
    let license = c"GPL";
    let mut attr = ProgramLoad {
        kind,
        instruction_count: instructions.len() as u32,
        instructions: address(instructions.as_ptr()),
        license: address(license.as_ptr()),
        expected_attach_type,
        attach_type_id,
        ..ProgramLoad::default()
    };
    // SAFETY: the kernel reads `instruction_count` instructions of 8 bytes and a NUL-terminated
    // license.
    unsafe { open(bpf_cmd::BPF_PROG_LOAD, "bpf(BPF_PROG_LOAD)", &mut attr) }
}
