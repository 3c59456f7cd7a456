//! A case's program as a model file: Core ML's protobuf, written by hand so that nothing of the reader is used.
//!
//! Field numbers are those of `Model.proto`, `FeatureTypes.proto` and `MIL.proto`.

use half::f16;

use crate::text::{Argument, Block, Case, Literal, Op, Type};

/// A message as it grows.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn int(mut self, field: u64, value: i64) -> Message {
        self.varint(field << 3);
        self.varint(value as u64);
        self
    }

    fn bytes(mut self, field: u64, bytes: &[u8]) -> Message {
        self.varint(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self
    }

    fn text(self, field: u64, text: &str) -> Message {
        self.bytes(field, text.as_bytes())
    }

    fn message(self, field: u64, message: Message) -> Message {
        self.bytes(field, &message.0)
    }

    fn each<T>(self, items: &[T], add: impl Fn(Message, &T) -> Message) -> Message {
        items.iter().fold(self, add)
    }

    /// An entry of a map from names to messages.
    fn entry(self, field: u64, key: &str, value: Message) -> Message {
        self.message(field, Message::default().text(1, key).message(2, value))
    }
}

fn new() -> Message {
    Message::default()
}

fn data_type(name: &str) -> i64 {
    match name {
        "bool" => 1,
        "string" => 2,
        "fp16" => 10,
        "fp32" => 11,
        "int8" => 21,
        "int16" => 22,
        "int32" => 23,
        "int4" => 25,
        "uint8" => 31,
        "uint16" => 32,
        "uint32" => 33,
        "uint4" => 35,
        "uint2" => 36,
        "uint1" => 37,
        "uint6" => 38,
        "uint3" => 39,
        other => panic!("{other}"),
    }
}

fn value_type(ty: &Type) -> Message {
    let dims = new().int(1, data_type(&ty.dtype)).int(2, ty.dims.len() as i64);
    let tensor = dims.each(&ty.dims, |tensor, dim| {
        tensor.message(
            3,
            match dim {
                Some(size) => new().message(1, new().int(1, *size as i64)),
                None => new().message(2, new()),
            },
        )
    });
    let tensor = new().message(1, tensor);
    // A state wraps a type.
    if ty.state { new().message(5, new().message(1, tensor)) } else { tensor }
}

fn named(name: &str, ty: &Type) -> Message {
    new().text(1, name).message(2, value_type(ty))
}

/// Bits of an element that is smaller than a byte.
fn sub_byte(name: &str) -> Option<u32> {
    Some(match name {
        "uint1" => 1,
        "uint2" => 2,
        "uint3" => 3,
        "int4" | "uint4" => 4,
        "uint6" => 6,
        _ => return None,
    })
}

/// Elements of `bits` bits one after the other, the lowest bit first.
fn packed(bits: u32, values: impl Iterator<Item = f64>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let all = values.flat_map(|v| (0..bits).map(move |bit| (v as i64 >> bit & 1) as u8));
    for (at, bit) in all.enumerate() {
        if at % 8 == 0 {
            bytes.push(0);
        }
        bytes[at / 8] |= bit << (at % 8);
    }
    bytes
}

/// The elements of a constant, in the field that Core ML keeps their type in.
fn tensor_value(dtype: &str, values: &[Literal]) -> Message {
    let numbers = || values.iter().map(Literal::number);
    match dtype {
        "fp32" => {
            let bytes: Vec<u8> = numbers().flat_map(|v| (v as f32).to_le_bytes()).collect();
            new().message(1, new().bytes(1, &bytes))
        }
        "int32" => {
            let mut packed = new();
            numbers().for_each(|v| packed.varint(v as i64 as u64));
            new().message(2, new().bytes(1, &packed.0))
        }
        "bool" => {
            let bytes: Vec<u8> = numbers().map(|v| u8::from(v != 0.0)).collect();
            new().message(3, new().bytes(1, &bytes))
        }
        "string" => new().message(
            4,
            new().each(values, |strings, value| match value {
                Literal::Text(text) => strings.text(1, text),
                other => panic!("{other:?} is no string"),
            }),
        ),
        _ if sub_byte(dtype).is_some() => {
            let bits = sub_byte(dtype).expect("as was checked");
            new().message(7, new().bytes(1, &packed(bits, numbers())))
        }
        _ => {
            let bytes: Vec<u8> = numbers()
                .flat_map(|v| match dtype {
                    "fp16" => f16::from_f64(v).to_le_bytes().to_vec(),
                    "int8" => (v as i8).to_le_bytes().to_vec(),
                    "uint8" => (v as u8).to_le_bytes().to_vec(),
                    "int16" => (v as i16).to_le_bytes().to_vec(),
                    "uint16" => (v as u16).to_le_bytes().to_vec(),
                    "uint32" => (v as u32).to_le_bytes().to_vec(),
                    other => panic!("{other}"),
                })
                .collect();
            new().message(7, new().bytes(1, &bytes))
        }
    }
}

fn value(ty: &Type, values: &[Literal]) -> Message {
    new().message(2, value_type(ty)).message(3, new().message(1, tensor_value(&ty.dtype, values)))
}

fn op(op: &Op) -> Message {
    let message = new().text(1, &op.kind);
    let message = message.each(&op.inputs, |message, (name, arguments)| {
        let bindings = new().each(arguments, |bindings, argument| {
            bindings.message(
                1,
                match argument {
                    Argument::Value(name) => new().text(1, name),
                    Argument::Constant(ty, values) => new().message(2, value(ty, values)),
                },
            )
        });
        message.entry(2, name, bindings)
    });
    let message = message.each(&op.outputs, |message, (name, ty)| message.message(3, named(name, ty)));
    let message = message.each(&op.attributes, |message, (name, arguments)| match arguments.as_slice() {
        [Argument::Constant(ty, values)] => message.entry(5, name, value(ty, values)),
        other => panic!("attribute `{name}` is {other:?}"),
    });
    message.each(&op.blocks, |message, b| message.message(4, block(&b.inputs, &b.ops, &b.results)))
}

/// What a result is called: one that is a constant gets a name of its own.
fn result_name(i: usize, result: &Argument) -> String {
    match result {
        Argument::Value(name) => name.clone(),
        Argument::Constant(..) => format!("constant_{i}"),
    }
}

fn block(inputs: &[(String, Type)], ops: &[Op], results: &[Argument]) -> Message {
    let message = new().each(inputs, |message, (name, ty)| message.message(1, named(name, ty)));
    let mut message = message.each(ops, |message, inner| message.message(3, op(inner)));
    for (i, result) in results.iter().enumerate() {
        let name = result_name(i, result);
        if let Argument::Constant(ty, values) = result {
            let constant = new().text(1, "const").message(3, named(&name, ty));
            message = message.message(3, constant.entry(5, "val", value(ty, values)));
        }
        message = message.text(2, &name);
    }
    message
}

/// The case's program as a model file.
pub(crate) fn model(case: &Case) -> Vec<u8> {
    let Block { inputs, ops, results } = &case.body;
    let function = new()
        .each(inputs, |message, (name, ty)| message.message(1, named(name, ty)))
        .text(2, &case.opset)
        .entry(3, &case.opset, block(&[], ops, results));
    let program = new().int(1, 1).entry(2, "main", function);
    let array = |name: &str| new().text(1, name).message(3, new().message(5, new()));
    let state = |name: &str| {
        let wrapped = new().message(8, new().message(1, new()));
        new().text(1, name).message(3, wrapped)
    };
    let mut description = new().each(inputs, |message, (name, ty)| match ty.state {
        true => message.message(13, state(name)),
        false => message.message(1, array(name)),
    });
    for (i, result) in results.iter().enumerate() {
        description = description.message(10, array(&result_name(i, result)));
    }
    let opset: i64 = case.opset.trim_start_matches("CoreML").parse().expect("an opset has a number");
    new().int(1, opset + 1).message(2, description).message(502, program).0
}
