"""Chat templates with the structure of those that well-known models come with, for the tiny tokenizer."""

from __future__ import annotations

# The shared part of Qwen2.5 and Qwen3: tools in the system message, calls as <tool_call>, and the results of
# consecutive tool messages gathered in one message of the user.
_TOOLS_HEAD = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}"
    "{{- '# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}"
    '{{- \'\n</tools>\nAnswer with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n\' }}'
    "{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{%- endif %}"
)
_CALLS = (
    "{%- for tool_call in message.tool_calls %}"
    "{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}"
    "{%- if content is not defined or content or not loop.first %}{{- '\n' }}{%- endif %}"
    '{{- \'<tool_call>\n{"name": "\' + tool_call.name + \'", "arguments": \' }}'
    "{%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}"
    "{%- endif %}{{- '}\n</tool_call>' }}{%- endfor %}"
)
_RESULTS = (
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
)
QWEN25 = (
    _TOOLS_HEAD + "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first)"
    " or (message.role == 'assistant' and not message.tool_calls) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant' }}"
    "{%- if message.content %}{{- '\n' + message.content }}{%- endif %}" + _CALLS + "{{- '<|im_end|>\n' }}"
    "" + _RESULTS + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# Qwen3: thoughts are dropped from answers before the last question of the user (what tools say is none), and an empty
# thought is written for the model when thinking is off.
QWEN3 = (
    _TOOLS_HEAD + "{%- set ns = namespace(searching=true, last=messages|length - 1) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.searching and message.role == 'user' and message.content is string and not"
    " message.content.startswith('<tool_response>') %}"
    "{%- set ns.searching = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{%- set content = message.content %}{%- set thought = '' %}"
    "{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}" + _CALLS + "{{- '<|im_end|>\n' }}"
    "" + _RESULTS + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
# Llama 3.1: contents are trimmed, the first message holds a date, and results come from `ipython`.
LLAMA31 = (
    "{{- '<|begin|><|header|>system<|end_header|>\n\nToday: ' + (date_string or '26 Jul 2024') + '\n\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{%- set messages = messages[1:] %}"
    "{%- endif %}{{- '<|im_end|>' }}"
    '{%- if tools %}{{- \'<|header|>user<|end_header|>\n\nUse {"name": ..., "parameters": ...}.\n\n\' }}'
    "{%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}"
    "{{- messages[0].content | trim + '<|im_end|>' }}{%- set messages = messages[1:] %}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}{{- '<|header|>ipython<|end_header|>\n\n' + (message.content | tojson) }}"
    "{{- '<|im_end|>' }}"
    "{%- elif message.tool_calls %}{%- if message.tool_calls|length != 1 %}"
    "{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    '{{- \'<|header|>assistant<|end_header|>\n\n{"name": "\' + message.tool_calls[0].function.name }}'
    "{{- '\", \"parameters\": ' + (message.tool_calls[0].function.arguments | tojson) + '}<|im_end|>' }}"
    "{%- else %}{{- '<|header|>' + message.role + '<|end_header|>\n\n' + (message.content | trim) + '<|im_end|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|header|>assistant<|end_header|>\n\n' }}{%- endif %}"
)
# Mistral: roles must alternate, the tools stand before the last question, and calls and results have ids of nine.
MISTRAL = (
    "{{- '<|begin|>' }}{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}"
    "{%- if tools and message == users[-1] %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}"
    "{%- endif %}{{- '[INST]' + message.content + '[/INST]' }}"
    "{%- elif message.tool_calls %}{{- '[TOOL_CALLS][' }}"
    "{%- for call in message.tool_calls %}{%- if call.id|length != 9 %}{{- raise_exception('ids have 9 characters') }}"
    "{%- endif %}{{- call.function | tojson }}{{- ']<|im_end|>' if loop.last else ', ' }}{%- endfor %}"
    "{%- elif message.role == 'assistant' %}{{- ' ' + message.content + '<|im_end|>' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if not messages[loop.index0 - 1].tool_calls and messages[loop.index0 - 1].role != 'tool' %}"
    "{{- raise_exception('a result without a call') }}{%- endif %}"
    "{{- '[TOOL_RESULTS]{\"content\": ' + (message.content | tojson) + '}[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}"
)
# Gemma: the token that ends a turn is not the tokenizer's EOS; the model's generation_config.json names it.
GEMMA = (
    "{{- '<|begin|>' }}{%- for message in messages %}"
    "{{- '<|header|>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}"
    "{{- message.content | trim + '<|end_header|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|header|>model\n' }}{%- endif %}"
)
