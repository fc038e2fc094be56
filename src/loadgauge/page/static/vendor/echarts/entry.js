export { init } from 'echarts/core';
import { use } from 'echarts/core';
import { LineChart, ScatterChart, ParallelChart } from 'echarts/charts';
import { GridSimpleComponent, TooltipComponent, MarkLineComponent, ParallelComponent } from 'echarts/components';
import { CanvasRenderer } from 'echarts/renderers';
use([LineChart, ScatterChart, ParallelChart, GridSimpleComponent, TooltipComponent, MarkLineComponent, ParallelComponent, CanvasRenderer]);
