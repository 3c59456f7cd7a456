use kvbaton_kernels::rows::*;
fn main(){ let isa=Isa::portable(); let row=[0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,-4.05,0.0f32]; for n in 2..=17 { let mut d=vec![0.0;n]; layer_norm(isa,&row[17-n..],1e-3,None,None,&mut d,false); println!("{n} {:?}",d); println!("{}", reduce(isa, Reduction::Sum, &row[17-n..])); } }
