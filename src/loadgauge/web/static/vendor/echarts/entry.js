export { init, use, graphic } from 'echarts/core';
import { use } from 'echarts/core';
import { LineChart, ScatterChart, ParallelChart } from 'echarts/charts';
import { GridComponent, TooltipComponent, MarkLineComponent, ParallelComponent } from 'echarts/components';
import { CanvasRenderer } from 'echarts/renderers';
use([LineChart, ScatterChart, ParallelChart, GridComponent, TooltipComponent, MarkLineComponent, ParallelComponent, CanvasRenderer]);
