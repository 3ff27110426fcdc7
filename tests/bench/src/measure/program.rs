//! XDP programs of the benchmark, as instructions.

/// Length of the smallest Ethernet frame without its checksum.
pub(crate) const FRAME: usize = 60;
/// First source port of the flows.
pub(crate) const FIRST_PORT: u16 = 10_000;

const XDP_ABORTED: i32 = 0;
const XDP_DROP: i32 = 1;
const XDP_PASS: i32 = 2;
const XDP_TX: i32 = 3;
const ETHERTYPE: i16 = 12;
const IPV4: i32 = 0x0800;
const PROTOCOL: i16 = 23;
const UDP: i32 = 17;
const SOURCE_PORT: i16 = 34;
const PRANDOM: i32 = 7;
const REDIRECT: i32 = 23;

const EXIT: u64 = instruction(0x95, 0, 0, 0, 0);

/// Returns an instruction in the byte order of x86-64 and arm64.
const fn instruction(code: u8, to: u8, from: u8, offset: i16, value: i32) -> u64 {
    code as u64 | ((from << 4 | to) as u64) << 8 | (offset as u16 as u64) << 16 | (value as u32 as u64) << 32
}

/// Returns `r[to] = value`.
const fn set(to: u8, value: i32) -> u64 {
    instruction(0xb7, to, 0, 0, value)
}

/// Returns `r[to] = r[from]`.
const fn copy(to: u8, from: u8) -> u64 {
    instruction(0xbf, to, from, 0, 0)
}

const fn call(helper: i32) -> u64 {
    instruction(0x85, 0, 0, 0, helper)
}

/// Puts the address of the frame, whose context is in `r[context]`, into r2. If it has fewer than
/// `length` bytes, the program goes on `beyond` instructions further. Uses r3 and r4.
fn frame(context: u8, length: usize, beyond: i16) -> [u64; 5] {
    [
        instruction(0x61, 2, context, 0, 0),
        instruction(0x61, 3, context, 4, 0),
        copy(4, 2),
        instruction(0x07, 4, 0, 0, length as i32),
        instruction(0x2d, 4, 3, beyond, 0),
    ]
}

pub(crate) fn send_back() -> Vec<u64> {
    vec![set(0, XDP_TX), EXIT]
}

/// Returns a program that drops IPv4 datagrams, of which the lab has no others meanwhile.
/// Everything else passes: neighbours, and the API server's connections.
pub(crate) fn drop_datagrams() -> Vec<u64> {
    let mut program = frame(1, 34, 6).to_vec();
    program.extend([
        instruction(0x69, 5, 2, ETHERTYPE, 0),
        // The byte order of the frame is not that of the machine.
        instruction(0x55, 5, 0, 4, IPV4.swap_bytes() >> 16),
        instruction(0x71, 5, 2, PROTOCOL, 0),
        instruction(0x55, 5, 0, 2, UDP),
        set(0, XDP_DROP),
        EXIT,
        set(0, XDP_PASS),
        EXIT,
    ]);
    program
}

/// Returns a program that sends each frame by the device, with the source port of one of `flows`
/// flows. `flows` must be a power of two.
pub(crate) fn generate(bytes: &[u8; FRAME], flows: u32, device: u32) -> Vec<u64> {
    let draw = [
        // The instructions are: r0 &= flows - 1; r0 += FIRST_PORT; r0 in network byte order.
        instruction(0x57, 0, 0, 0, flows.next_power_of_two() as i32 - 1),
        instruction(0x07, 0, 0, 0, i32::from(FIRST_PORT)),
        instruction(0xdc, 0, 0, 0, 16),
        copy(7, 0),
    ];
    send(bytes, &draw, &[store_half(7, SOURCE_PORT)], device)
}

/// Returns a program that sends each frame, an IPv4 SYN, by the device. The source is another port
/// and another of 65,536 addresses each time. The checksums stay right: the complement of each
/// change is written to fields that nobody reads. These are the id of the IPv4 header, and numbers
/// of the TCP header.
pub(crate) fn flood(bytes: &[u8; FRAME], device: u32) -> Vec<u64> {
    const ID: i16 = 18;
    const LOWER_HALF_OF_SOURCE: i16 = 28;
    const LOWER_HALF_OF_SEQUENCE: i16 = 40;
    const LOWER_HALF_OF_ACKNOWLEDGEMENT: i16 = 44;
    let draw = [
        copy(7, 0),
        copy(8, 0),
        // The instructions are: r8 >>= 16; r8 |= 1. The port is then never 0.
        instruction(0x77, 8, 0, 0, 16),
        instruction(0x47, 8, 0, 0, 1),
    ];
    let vary = [
        store_half(7, LOWER_HALF_OF_SOURCE),
        store_half(8, SOURCE_PORT),
        // The instructions are: r7 ^= -1; r8 ^= -1.
        instruction(0xa7, 7, 0, 0, -1),
        instruction(0xa7, 8, 0, 0, -1),
        store_half(7, ID),
        store_half(7, LOWER_HALF_OF_ACKNOWLEDGEMENT),
        store_half(8, LOWER_HALF_OF_SEQUENCE),
    ];
    send(bytes, &draw, &vary, device)
}

/// Returns `*(u16 *)(r2 + offset) = r[from]`.
const fn store_half(from: u8, offset: i16) -> u64 {
    instruction(0x6b, 2, from, offset, 0)
}

/// Returns a program that writes the whole frame anew and sends it by the device. This is needed
/// because a frame that was dropped comes back as it was translated. `draw` finds a random number
/// in r0, and `vary` the frame in r2. Both may use r7 and r8.
fn send(bytes: &[u8; FRAME], draw: &[u64], vary: &[u64], device: u32) -> Vec<u64> {
    let (words, _) = bytes.as_chunks::<4>();
    let beyond = (words.len() + vary.len()) as i16 + 4;
    let mut program = vec![copy(6, 1), call(PRANDOM)];
    program.extend(draw);
    program.extend(frame(6, FRAME, beyond));
    program.extend(
        words
            .iter()
            .zip((0_i16..).step_by(4))
            .map(|(word, offset)| instruction(0x62, 2, 0, offset, i32::from_ne_bytes(*word))),
    );
    program.extend(vary);
    program.extend([set(1, device as i32), set(2, 0), call(REDIRECT), EXIT, set(0, XDP_ABORTED), EXIT]);
    program
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_as_the_kernel_reads_them() {
        assert_eq!([set(0, XDP_PASS), EXIT], lab::xdp::PASS);
        assert_eq!(instruction(0x62, 2, 0, 4, -1).to_le_bytes(), [0x62, 2, 4, 0, 255, 255, 255, 255]);
    }

    #[test]
    fn jumps_go_to_the_last_two_instructions() {
        for program in [drop_datagrams(), generate(&[0; FRAME], 1_024, 3), flood(&[0; FRAME], 3)] {
            let jumps = program.iter().enumerate().filter(|(_, word)| [0x2d, 0x55].contains(&(**word as u8)));
            for (index, word) in jumps {
                assert_eq!(index + 1 + usize::from((word >> 16) as u16), program.len() - 2);
            }
        }
    }
}
