"""The PCIe tree and the home NICs of the GPUs as a picture (SVG)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from r2ccl_ctl.gpus import Gpu
from r2ccl_ctl.hostnics import HostNic
from r2ccl_ctl.topo import Branch, Service, roots, services

# In pixels.
GAP, HEAD, LINE = 10, 24, 16
DEVICE_HIGH = 42
LETTER = 7.2  # of the text's size, wide
LANE = 7  # from one line to the next
ROW = 4  # host bridges beside each other

STYLE = """
text { font: 12px sans-serif; fill: #1a1a1a; }
.small { font-size: 11px; fill: #555; }
.numa { fill: #f6f6f6; stroke: #888; }
.port { fill: #fff; stroke: #bbb; }
.gpu { fill: #dcefc9; stroke: #5b8c2a; }
.nic { fill: #d3e5f7; stroke: #2f6ea8; }
.spare { fill: #eee; stroke: #999; stroke-dasharray: 4 3; }
.home { stroke: #2f6ea8; stroke-width: 1.5; fill: none; }
"""


@dataclass
class Box:
    """A rectangle with text; x and y are relative to its parent until `place`."""

    kind: str
    lines: list[str]
    width: float
    height: float
    x: float = 0
    y: float = 0
    title: str = ""
    device: Gpu | HostNic | None = None
    inside: list[Box] = field(default_factory=list)

    def all(self) -> list[Box]:
        return [self, *(box for one in self.inside for box in one.all())]

    def place(self, x: float, y: float) -> None:
        self.x, self.y = self.x + x, self.y + y
        for one in self.inside:
            one.place(self.x, self.y)


def picture(gpus: Sequence[Gpu], nics: Sequence[HostNic]) -> str:
    served = services(gpus, nics)
    nodes = [node_box(root, served) for root in roots(gpus, nics)]
    sheet = group("sheet", "", nodes, columns=1)
    sheet.place(0, 0)
    boxes = sheet.all()[1:]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{sheet.width:.0f}" '
        f'height="{sheet.height:.0f}" viewBox="0 0 {sheet.width:.0f} {sheet.height:.0f}">',
        f"<style>{STYLE}</style>",
        *(drawn(box) for box in boxes),
        *home_lines(served, boxes),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def node_box(root: Branch, served: Sequence[Service]) -> Box:
    found = [branch_box(branch, served) for branch in root.sorted()]
    lanes = sum(isinstance(box.device, Gpu) for box in found)  # for lines below their row
    return group("numa", root.name, found, columns=ROW, below=LANE * lanes)


def branch_box(branch: Branch, served: Sequence[Service]) -> Box:
    name, branch = branch.follow()
    own = [device_box(device, served) for device in branch.devices]
    if own and not branch.below and len(own) == 1:
        own[0].lines[1:1] = [name.rpartition(" > ")[2]]
        own[0].height = DEVICE_HIGH + LINE
        return own[0]
    below = [branch_box(one, served) for one in branch.sorted()]
    return group("port", name.replace(" > ", " "), [*own, *below], columns=1)


def device_box(device: Gpu | HostNic, served: Sequence[Service]) -> Box:
    if isinstance(device, Gpu):
        service = next((one for one in served if one.gpu == device), None)
        lines = [f"GPU {device.index}  {device.name}"]
        lines.append(f"home NIC {service.home.name}" if service else "no NIC")
        title = order_text(service) if service else ""
        kind = "gpu"
    else:
        speed = f"{device.speed_mbps // 1000} Gbit/s" if device.speed_mbps >= 1000 else ""
        lines = [f"NIC {device.name}  {device.rdma}".rstrip(), f"{device.addr}  {speed}".rstrip()]
        title = "a spare: it is slow" if not device.weight else ""
        kind = "nic" if device.weight else "spare"
    width = max(map(len, lines)) * LETTER + 2 * GAP
    return Box(kind, lines, width, DEVICE_HIGH, title=title, device=device)


def order_text(service: Service) -> str:
    then = ", ".join(f"{nic.name} ({near})" for nic, near in service.order)
    return f"{service.home.name}: {service.why}" + (f"; then {then}" if then else "")


def group(kind: str, name: str, inside: list[Box], *, columns: int, below: int = 0) -> Box:
    """Boxes in rows below a name. Those of a column are equally wide."""
    top = HEAD if name else GAP
    widths = [max((box.width for box in inside[c::columns]), default=0) for c in range(columns)]
    y, right = float(top), len(name) * LETTER + 2 * GAP
    for first in range(0, len(inside), columns):
        row, x = inside[first : first + columns], float(GAP)
        for box, width in zip(row, widths, strict=False):
            box.x, box.y, box.width = x, y, width
            x += width + GAP
            stretch(box)
        y += max(box.height for box in row) + GAP + below
        right = max(right, x)
    return Box(kind, [name] if name else [], right, y, inside=inside)


def stretch(box: Box) -> None:
    """What it has in one column becomes as wide as it."""
    for one in box.inside if box.kind == "port" else ():
        one.width = box.width - 2 * GAP
        stretch(one)


def drawn(box: Box) -> str:
    title = f"<title>{escape(box.title)}</title>" if box.title else ""
    parts = [
        f'<g><rect class="{box.kind}" x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" '
        f'height="{box.height:.1f}" rx="4"/>{title}'
    ]
    for number, line in enumerate(box.lines):
        small = ' class="small"' if number else ""
        parts.append(
            f'<text{small} x="{box.x + GAP:.1f}" y="{box.y + (number + 1) * LINE:.1f}">'
            f"{escape(line)}</text>"
        )
    return "".join([*parts, "</g>"])


def home_lines(served: Sequence[Service], boxes: Sequence[Box]) -> list[str]:
    """From each GPU to its home NIC: beside a column, below a row, else straight across."""
    lines, lanes = [], dict[float, int]()
    for service in served:
        a = next(box for box in boxes if box.device is service.gpu)
        b = next(box for box in boxes if box.device is service.home)
        if a.x == b.x:
            edge = a.x + a.width
            path = f"M {edge:.1f} {a.y + a.height / 2:.1f} h {GAP / 2} "
            path += f"V {b.y + b.height / 2:.1f} H {edge:.1f}"
        elif a.y == b.y:
            lane = lanes[a.y] = lanes.get(a.y, 0) + 1
            path = f"M {a.x + a.width / 2:.1f} {a.y + a.height:.1f} v {lane * LANE} "
            path += f"H {b.x + b.width / 2 + lane * LANE:.1f} V {b.y + b.height:.1f}"
        else:
            path = f"M {a.x + a.width / 2:.1f} {a.y + a.height:.1f} "
            path += f"L {b.x + b.width / 2:.1f} {b.y:.1f}"
        lines.append(f'<path class="home" d="{path}"/>')
    return lines
