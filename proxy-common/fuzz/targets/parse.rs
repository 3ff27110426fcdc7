#![no_main]

use proxy_common::packet::properties;

libfuzzer_sys::fuzz_target!(|input: &[u8]| properties::parses(input));
