from .monitor import Alarm as Alarm, Monitor as Monitor, MonitorSizes as MonitorSizes, Status as Status
