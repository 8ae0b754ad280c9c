"""The page of `averaging dashboard`: a run in a browser. Needs `pip install '.[dashboard]'`.

Read in this order: `history` (curves and rounds, bounded; pure), `server` (who may read, the page's files and its
events), then `page/` (the page itself: it only reads, is written by hand, and loads nothing from elsewhere).
"""

from averaging.dashboard.history import CurvePoint as CurvePoint, RunHistory as RunHistory
from averaging.dashboard.server import RECEIPTS as RECEIPTS, DashboardServer as DashboardServer, views_of as views_of
